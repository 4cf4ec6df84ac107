"""Passes that repeat: what is planned of them, and what that means in the whole iteration."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from planner import Budgets, Trace, floor, plan
from planner.lp import solve_program
from planner.policies import registry
from planner.problem import LaidOut, live_bytes, repeats_of
from tests.planner.traces import hand, layers, microbatches, replay


def budgets(trace: Trace, share: float) -> Budgets:
    """So much of what lies between the floor and the peak."""
    least, peak = floor(trace)[0], max(live_bytes(trace))
    return Budgets(device_bytes=int(least + share * (peak - least)))


def checked(made: Trace) -> Trace:
    """The same trace, which its constructor has checked."""
    return Trace.build(**{name: getattr(made, name) for name in Trace.model_fields})


@pytest.mark.parametrize("user", [False, True])
def test_one_pass_stands_for_those_between_the_first_and_the_last(user: bool) -> None:
    traced = microbatches(6, user=user)
    found = repeats_of(traced)
    length = 6 + user
    assert found is not None
    assert (found.first, found.length, found.times) == (length, length, 4)
    once = checked(found.once)
    assert [stage.name for stage in once.stages] == [stage.name for stage in traced.stages[:length]]
    kinds = Counter((block.kind, block.persistent) for block in once.blocks)
    assert kinds == {("activation", False): 3, ("gradient", True): 3, ("parameter", True): 3}, "states are used in no pass"
    assert found.budgets(Budgets(device_bytes=20, host_bytes=100)).host_bytes == 100, "they can wait on the drive"
    assert found.budgets(Budgets(device_bytes=20, host_bytes=100, storage_bytes=30)).host_bytes == 94


@pytest.mark.parametrize("user", [False, True])
def test_at_the_border_the_last_pass_follows_the_first(user: bool) -> None:
    """Between them is a stage without time, which reads what does not wait when a pass begins."""
    found = repeats_of(microbatches(6, user=user))
    assert found is not None
    alone = plan(found.once, budgets(found.once, 0.3))
    border = checked(LaidOut(found, alone.model_copy(update={"recompute": ()})).border)
    waiting = {move.block for move in alone.moves if move.before >= found.length}
    kept = [each.name for each in found.once.blocks if each.persistent and each.id not in waiting]
    assert border.stages[found.first].duration_seconds == 0 and 0 < len(kept) < 6
    assert [block.name for block in border.blocks if found.first in block.reads] == kept

    def without(stages: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(stage - (stage > found.first) for stage in stages if stage != found.first)

    blocks = [b.model_copy(update={"reads": without(b.reads), "writes": without(b.writes)}) for b in border.blocks]
    subgroups = [each.model_copy(update={"stage": each.stage - 1}) for each in border.subgroups]
    stages = [
        each.model_copy(update={"id": each.id - (each.id > found.first)}) for each in border.stages if each.id != found.first
    ]
    left = border.rebuilt(stages=tuple(stages), blocks=tuple(blocks), subgroups=tuple(subgroups))
    assert left.fingerprint == microbatches(2, user=user).rebuilt(recompute=()).fingerprint


def test_what_waits_when_a_pass_begins_does_so_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = microbatches(8, 6, rate=3.0)
    found = repeats_of(traced)
    assert found is not None
    monkeypatch.setattr(registry, "WHOLE_STAGES", 10)
    made = plan(traced, budgets(traced, 0.3), policy="offload-only", lower_bound=False)

    def waiting(stage: int) -> set[int]:
        over = (move for move in made.moves if move.prefetch is not None and move.after < stage <= move.prefetch.start)
        return {found.blocks[move.block] for move in over if move.block in found.blocks}

    begins = range(found.first, found.end, found.length)
    assert waiting(begins[1]) and all(waiting(begin) == waiting(begins[1]) for begin in begins)


def test_what_runs_again_in_one_pass_does_so_in_all() -> None:
    traced = microbatches(6, rate=2.0)
    found = repeats_of(traced)
    assert found is not None
    chosen = plan(found.once, budgets(found.once, 0.0)).recompute
    assert chosen
    everywhere = LaidOut(found, plan(found.once, budgets(found.once, 0.0))).recompute
    assert [(each.group % 3, each.at % 6) for each in everywhere] == [(each.group, each.at) for each in chosen] * 6


@pytest.mark.parametrize("traced", [hand("chain"), layers(), microbatches(3)], ids=["no pass", "one pass", "three passes"])
def test_nothing_repeats_without_two_like_passes_inside(traced: Trace) -> None:
    assert repeats_of(traced) is None


def test_a_pass_with_another_block_is_not_alike() -> None:
    traced = microbatches(6)
    blocks = list(traced.blocks)
    blocks[7] = blocks[7].model_copy(update={"size_bytes": 11})
    assert repeats_of(traced.rebuilt(blocks=tuple(blocks))) is None


@pytest.mark.parametrize("user", [False, True])
@pytest.mark.parametrize(("share", "policy"), [(0.0, "ilp"), (0.3, "offload-only"), (0.5, "ilp"), (0.7, "checkpoint")])
def test_the_plan_of_one_pass_holds_for_the_whole_iteration(
    share: float, policy: str, user: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is replayed there, and no slower than moves on demand."""
    traced = microbatches(7, 2, user=user)
    given = budgets(traced, share)
    monkeypatch.setattr(registry, "WHOLE_STAGES", 10)
    made = plan(traced, given, policy=policy)
    seconds = replay(traced, made).iteration_seconds
    assert made.policy == policy and made.predicted is not None and made.predicted.ideal_seconds == traced.ideal_seconds
    belady = plan(traced, given, policy="belady").predicted
    assert belady is not None and (policy == "checkpoint" or seconds <= belady.iteration_seconds)


def test_what_is_a_little_better_in_the_short_iteration_may_lose_in_the_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Re-runs that are cheap in the first copy of the stretch take long in the second: the plan without any wins."""
    traced = microbatches(4, 2, rate=5.0)
    of_pass = [0.1, 0.1, 20.0, 0.1]
    groups = [each.model_copy(update={"duration_seconds": of_pass[each.stage // 4]}) for each in traced.recompute]
    traced = traced.rebuilt(recompute=tuple(groups))
    monkeypatch.setattr(registry, "WHOLE_STAGES", 10)
    one, other = (plan(traced, budgets(traced, 0.1), policy=policy, lower_bound=False) for policy in ("ilp", "offload-only"))
    assert replay(traced, one).iteration_seconds <= replay(traced, other).iteration_seconds * (1 + 1e-9)


def test_many_passes_take_few_programs_and_come_close_to_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight passes through 34 layers over slow links: each pass waits a little, and each runs the same layers again."""
    traced, solved = microbatches(8, 34, rate=3.0), []

    def counted(*given: Any, **more: Any) -> Any:
        solved.append(given)
        return solve_program(*given, **more)

    for module in ("planner.ilp.coarse", "planner.bound.lower_bound"):
        monkeypatch.setattr(f"{module}.solve_program", counted)
    monkeypatch.setattr("planner.policies.optimise.with_other_large_blocks", lambda found: found)  # most of the time, for 1 %
    made = plan(traced, budgets(traced, 0.1), threads=1)
    assert len(traced.stages) > registry.WHOLE_STAGES and len(solved) <= 16
    assert len(made.recompute) == 8 * len({each.group % 34 for each in made.recompute}) > 0
    assert made.predicted is not None
    assert replay(traced, made).iteration_seconds <= 1.06 * made.predicted.lower_bound_seconds
