"""The lower bound is below the best of all plans, which is found by trying all, and mostly close to it."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given

from planner import Budgets, Trace, floor, plan, simulate
from planner.bound import lower_bound_seconds
from planner.problem import Problem, live_bytes, user_stages
from planner.schema import Stage

from ...thoroughness import by_profile
from .. import exhaustive
from ..strategies import problems
from ..traces import IN, OUT, block, by_hand, hardware, layers, links, microbatches, staged, subgroup, trace, trained

SAME = 1 + 1e-9
NOTHING_WHOLE, USUAL = -1, 32
"""Up to how many stages of idle blocks, blocks count as whole."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Random problems: how many, of how many decisions at the most, and what `variants` a plan can choose from.

    close: of those that stall, the bound of this share is at least 0.9 of the best. worst: the most that a plan takes, over the
    best of all. least: the smallest shares of the problems in which something is the case.
    """

    make: Callable[..., Problem]
    variants: Callable[[Problem], Iterable[Problem]]
    seed: int
    most: int
    count: int
    close: float
    least: dict[str, float]
    worst: float = math.inf


KINDS = {
    "copies": Kind(
        make=exhaustive.small_problem,
        variants=lambda problem: [problem],
        seed=20,
        most=500,
        count=by_profile(ci=30, long=400),
        close=0.65,
        least={"stalls": 0.5, "wraps": 0.5, "two tiers": 0.05, "user code": 0.3},
    ),
    "updates on the host": Kind(
        make=exhaustive.small_training,
        variants=exhaustive.placements,
        seed=21,
        most=600,
        count=by_profile(ci=16, long=160),
        close=0.5,
        least={"a variant is better": 0.2, "none is": 0.2, "user code": 0.25},
    ),
    "recomputation": Kind(
        make=exhaustive.small_with_groups,
        variants=exhaustive.recomputations,
        seed=22,
        most=400,
        count=by_profile(ci=10, long=160),
        close=0.4,
        least={"a variant is better": 0.15},
        worst=1.001,
    ),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_no_plan_of_all_beats_the_bound_and_the_best_is_mostly_close(kind: Kind) -> None:
    rng, seen = random.Random(kind.seed), Counter[str]()
    for number in range(kind.count):
        problem = kind.make(rng, most_combinations=kind.most)
        first, *others = (exhaustive.best_seconds(each) for each in kind.variants(problem))
        best = min(first, *others, math.inf)
        bounds = [lower_bound_seconds(problem), lower_bound_seconds(problem, max_instants=5)]
        bounds += [lower_bound_seconds(problem, max_instants=most, max_whole=NOTHING_WHOLE) for most in (5, 24)]
        which = f"{number}: {problem.source.model_dump_json()} {problem.budgets}"
        assert max(bounds) <= best * SAME, which
        if kind.worst < math.inf:
            made = simulate(problem.source, plan(problem.source, problem.budgets)).iteration_seconds
            assert 1 / SAME <= made / best <= kind.worst, which
        stalls = best > problem.trace.ideal_seconds * SAME
        seen["stalls"] += stalls
        seen["close"] += stalls and bounds[0] >= 0.9 * best
        seen["wraps"] += any(period.before >= problem.stage_count for period in problem.periods)
        seen["two tiers"] += len(problem.routes) == 2
        seen["user code"] += bool(user_stages(problem.trace))
        seen["a variant is better" if best < first / SAME else "none is"] += 1
    assert all(seen[what] >= share * kind.count for what, share in kind.least.items()), seen
    assert seen["close"] >= kind.close * seen["stalls"]


def test_the_time_of_a_rerun_is_not_hidden_in_the_stalls_of_the_optimizer() -> None:
    """The optimizer's state leaves no room for it before: 20 s in and 20 s out. Making a0 anew in the backward pass takes 1 s."""
    chain = layers(3, rate=1.0)
    update = Stage(id=6, name="optimizer/w", phase="optimizer", duration_seconds=1.0)
    state = chain.blocks[3].model_copy(update={"id": 4, "name": "state", "size_bytes": 20, "reads": (6,), "writes": (6,)})
    chain = chain.rebuilt(stages=(*chain.stages, update), blocks=(*chain.blocks, state))
    made = plan(chain, Budgets(device_bytes=31))
    assert made.predicted is not None and [(each.group, each.at) for each in made.recompute] == [(0, 5)]
    assert made.predicted.iteration_seconds == pytest.approx(48.0)
    assert made.predicted.lower_bound_seconds == pytest.approx(48.0, rel=2e-6)


def test_a_rerun_may_end_the_life_of_a_block_that_outlives_its_last_use() -> None:
    """a0 has no use after stage 1, but lives on. If groups 0 and 1 run again before stage 4, it dies early and is made anew."""
    made = layers(3, rate=1.0)
    outliving = made.blocks[0].model_copy(update={"reads": (1,), "dies_after": 5})
    made = made.rebuilt(blocks=(outliving, *made.blocks[1:]))
    again = [{"group": 0, "at": 4}, {"group": 1, "at": 4}]
    seconds = simulate(made, by_hand(made, 31, recompute=again)).iteration_seconds
    assert seconds == pytest.approx(8.0)
    for whole in (NOTHING_WHOLE, USUAL):
        assert lower_bound_seconds(Problem.of(made, Budgets(device_bytes=31)), max_whole=whole) <= seconds * SAME


def test_half_an_update_on_the_host_and_the_other_half_of_its_states_there_take_a_whole_place() -> None:
    """Both states of 20 bytes are away in the forward pass. Host memory holds one of them, the other one goes to a slow drive."""
    halves = trace(
        staged("ffbboo", 1.0, {0: 20}),
        [each for part in range(2) for each in trained((1, 1, 20), [part, 3 - part], 3 - part, 4 + part)],
        links({"device->host": 100.0, "host->device": 100.0, OUT: 1.0, IN: 1.0}),
        subgroups=[subgroup(4 + part, range(3 * part, 3 * part + 3)) for part in range(2)],
    )
    budgets = Budgets(device_bytes=24, host_bytes=22)
    bound = lower_bound_seconds(Problem.of(halves, budgets), max_whole=NOTHING_WHOLE)
    made = plan(halves, budgets)
    assert made.predicted is not None
    assert 25.0 < bound <= made.predicted.iteration_seconds * SAME


@given(problems())
def test_more_budget_and_fewer_instants_never_raise_the_bound(case: tuple[Trace, Budgets]) -> None:
    made, budgets = case
    most = max(live_bytes(made))
    steps = sorted({budgets.device_bytes, (budgets.device_bytes + most) // 2, most})
    bounds = [lower_bound_seconds(Problem.of(made, Budgets(device_bytes=step))) for step in steps]
    assert bounds[-1] == made.ideal_seconds
    rough = [lower_bound_seconds(Problem.of(made, budgets), max_instants=most) for most in (1000, 8, 3, 1)]
    for falling in (bounds, rough):
        assert all(later <= earlier * (1 + 1e-6) for earlier, later in pairwise(falling))


@pytest.mark.parametrize(("host_bytes", "seconds"), [(40, 5.0), (20, 7.0), (19, 11.0)])
def test_the_budget_of_a_lower_tier_counts(host_bytes: int, seconds: float) -> None:
    """40 bytes must be away in stage 1 of 3; host is four times as fast as storage.

    Both through host: 1 s out, 1 s in. One through each: 2 s out and in, in storage's time. Room for neither: 4 + 4.
    """
    made = trace(staged("uuu", 1.0, {1: 40}), [block(20, [0], [2])] * 2, hardware(host=True, rate=10.0))
    problem = Problem.of(made, Budgets(device_bytes=40, host_bytes=host_bytes))
    assert lower_bound_seconds(problem) == pytest.approx(seconds, rel=2e-6)


def test_added_up_passes_give_no_more_than_all_of_them_and_more_than_as_few_instants() -> None:
    """With all instants, the rows are sums of those of the whole iteration. No plan is below, and few instants say much more."""
    rng, tighter, count = random.Random(29), 0, by_profile(ci=8, long=150)
    for number in range(count):
        made = microbatches(rng.randint(4, 5), rng.randint(1, 2), rate=rng.choice([1.0, 3.0, 10.0]), user=rng.random() < 0.3)
        made = made.rebuilt(
            stages=tuple(stage.model_copy(update={"duration_seconds": rng.uniform(0.2, 3.0)}) for stage in made.stages)
        )
        least, peak = floor(made)[0], max(live_bytes(made))
        problem = Problem.of(made, Budgets(device_bytes=rng.randint(least, peak - 1)))
        few, most = lower_bound_seconds(problem, max_instants=12), 2 * len(made.stages)
        folded = [few, *(lower_bound_seconds(problem, max_instants=each, max_whole=NOTHING_WHOLE) for each in (12, most))]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("planner.bound.lower_bound.repeats_of", lambda trace: None)
            whole, of_few = (lower_bound_seconds(problem, max_instants=each) for each in (most, 12))
        seconds = plan(made, problem.budgets).replayed.iteration_seconds
        assert max(folded) <= min(whole, seconds) * (1 + 1e-6), number
        tighter += few > of_few * 1.01
    assert tighter >= count / 3
