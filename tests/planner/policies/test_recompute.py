"""Which groups run again: by hand, never slower than without, and the sets that are tried."""

import random

import pytest

from planner import BudgetError, Budgets, Trace, floor, plan
from planner.problem import RerunPlaces, kinds_of_places, live_bytes

from ...thoroughness import by_profile
from .. import exhaustive
from ..traces import layers, links, replay, saving_layers

TRACES = by_profile(ci=8, long=150)


def again(given: Trace, budget: int, policy: str) -> tuple[float, list[tuple[int, int]]]:
    made = plan(given, Budgets(device_bytes=budget), policy=policy)
    assert made.predicted is not None and made.policy == policy
    assert made.predicted.recompute_seconds == sum(given.recompute[each.group].duration_seconds for each in made.recompute)
    return replay(given, made).iteration_seconds, [(each.group, each.at) for each in made.recompute]


def test_over_a_slow_link_a_layer_runs_again_and_over_a_fast_one_it_moves() -> None:
    # Budget 31: one of a0 and a1 must be away in stage 2. A copy takes 10 s each way, or 0.1 s; a re-run 1 s.
    assert again(layers(rate=1.0), 31, "ilp") == (pytest.approx(7.0), [(0, 5)])
    seconds, groups = again(layers(rate=100.0), 31, "ilp")
    assert (seconds, groups) == (pytest.approx(6.1), [])
    assert again(layers(rate=100.0), 31, "offload-only") == (pytest.approx(6.1), [])
    # a0 leaves before stage 2, which waits for 10 s, and comes back when a2 has died, during stage 4: 6 + 10 + 9 s.
    assert again(layers(rate=1.0), 31, "offload-only") == (pytest.approx(25.0), [])


def test_long_iterations_do_not_rely_on_the_coarse_program_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second layer runs again from what the one before it made: 17 s. Over the link, each copy takes 10 s."""
    monkeypatch.setattr("planner.policies.keep_offload_recompute.rerun_shares", lambda *given, **more: (0.0, {}))
    made = layers(33, rate=1.0)
    names = [f"forward/{'odd' if number % 2 else 'even'}.{number}" for number in range(33)]
    named = [stage.model_copy(update={"name": name}) for stage, name in zip(made.stages, names, strict=False)]
    made = made.rebuilt(stages=(*named, *made.stages[33:]))
    seconds, groups = again(made, 200, "ilp")
    assert (seconds, len(groups)) == (pytest.approx(66 + 17), 17)


def test_fewer_groups_run_again_where_no_stage_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program asks for 13 groups of 1 s each, where 9 make the room that is needed."""
    shares = dict.fromkeys(range(13), 1.0)
    monkeypatch.setattr("planner.policies.keep_offload_recompute.rerun_shares", lambda *given, **more: (0.0, shares))
    seconds, groups = again(layers(33, rate=1.0), 220, "ilp")
    assert (seconds, len(groups)) == (pytest.approx(66 + 9), 9)


def test_recomputation_lowers_the_floor_where_no_tier_can_be_used() -> None:
    made = layers(4)
    alone = made.rebuilt(hardware=links({}))
    least = floor(alone)[0]
    assert least == 41 < max(live_bytes(alone)) == 50, "the weight, two blocks that are kept, what runs again, its workspace"
    assert floor(made)[0] == 30, "if blocks can wait elsewhere, only what a stage uses must be there"
    seconds, groups = again(alone, least, "ilp")
    assert groups and seconds > 8.0
    with pytest.raises(BudgetError) as refused:
        plan(alone, Budgets(device_bytes=30))
    assert refused.value.smallest_bytes == least and refused.value.stage == "backward/3"
    with pytest.raises(BudgetError):
        plan(alone, Budgets(device_bytes=least), policy="offload-only")


def test_a_plan_is_never_slower_than_without_recomputation() -> None:
    rng = random.Random(30)
    faster = 0
    for number in range(TRACES):
        problem = exhaustive.small_with_groups(rng, most_combinations=2000)
        source, budgets = problem.source, problem.budgets
        which = f"trace {number}: {source.model_dump_json()} {budgets}"
        made = [plan(source, budgets, policy=policy, lower_bound=False, write_weight=0) for policy in ("ilp", "offload-only")]
        one, other = (replay(source, each).iteration_seconds for each in made)
        assert one <= other * (1 + 1e-9), which
        faster += one < other * (1 - 1e-6)
    assert faster >= TRACES // 8


@pytest.mark.parametrize("rate", [1.0, 1000.0])
def test_long_iterations_too(rate: float) -> None:
    """80 stages: over a slow link layers run again, over a fast one all copies hide behind the arithmetic."""
    made = layers(40, rate=rate)
    (one, groups), (other, _) = (again(made, 250, policy) for policy in ("ilp", "offload-only"))
    assert one <= other * (1 + 1e-9)
    assert bool(groups) == (rate < 10) and (not groups or one < other * 0.9)


def test_groups_run_again_as_late_as_they_can() -> None:
    places = RerunPlaces(layers(4))
    assert [(each.group, each.at) for each in places.of([0, 2])] == [(2, 5), (0, 7)]
    # Group 2 reads what group 1 makes: that must be there when group 2 runs again.
    assert [(each.group, each.at) for each in places.of([1, 2])] == [(1, 5), (2, 5)]
    changed = RerunPlaces(layers(4, changed=(6,)))
    assert list(changed.usable) == [1, 2, 3], "before backward stage 7, the weight that group 0 reads has been changed"


def test_small_blocks_may_stay_so_that_groups_run_again_later() -> None:
    """What group 2 hands on is read by stage 4, what it saves by stage 5; and group 1 hands on what group 2 reads."""
    early, late = kinds_of_places(saving_layers(4))
    assert [(each.group, each.at) for each in early.of([1, 2])] == [(1, 4), (2, 4)]
    assert [(each.group, each.at) for each in late.of([1, 2])] == [(2, 5), (1, 6)]
    assert len(kinds_of_places(layers(4))) == 1, "where all is used by the stage that decides"


@pytest.mark.parametrize(("count", "stages_again"), [(4, 3), (40, 39)])
def test_layers_that_hand_on_little_run_again_one_by_one(count: int, stages_again: int) -> None:
    """Nothing can leave. What is handed on stays, beside what one layer saves; with early places there are two of these."""
    made = saving_layers(count)
    alone = made.rebuilt(hardware=links({}))
    least = floor(alone)[0]
    assert least == 90 + 10 * (count - 1) + 1, "and the workspace of a re-run"
    seconds, groups = again(alone, least, "ilp")
    assert (seconds, len(groups)) == (pytest.approx(2 * count + stages_again), stages_again)
