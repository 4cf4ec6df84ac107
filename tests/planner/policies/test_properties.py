"""For any trace and budget, a plan exists, can be carried out, does what it predicts, and is no slower than plans for less."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import BudgetError, Budgets, InfeasiblePlanError, Plan, Trace, UnsupportedError, floor, plan, simulate
from planner.bound import lower_bound_seconds
from planner.policies import HEURISTICS, POLICIES
from planner.problem import Problem, live_bytes

from ...thoroughness import by_profile
from ..strategies import problems, replay_of_random_plan, traces, training_problems
from ..traces import HAND, hand, layers, replay

SAME = 1 + 1e-9


def seconds(made: Trace, found: Plan) -> float:
    return replay(made, found).iteration_seconds


@pytest.mark.parametrize(
    ("policy", "cases"),
    [
        *((policy, problems()) for policy in ("ilp", *HEURISTICS)),
        ("belady", problems(most_stages=30, most_blocks=30)),
        ("ilp", training_problems()),
    ],
)
@given(data=st.data())
def test_every_plan_replays_within_its_budgets(policy: str, cases: Any, data: st.DataObject) -> None:
    made, budgets = data.draw(cases)
    found = plan(made, budgets, policy=policy, time_limit_seconds=60)
    assert found.budgets == budgets and found.policy == policy
    assert made.subgroups or policy != "ilp" or found.solver.status in ("optimal", "not needed")
    seconds(made, found)


@pytest.mark.parametrize(
    "cases", [problems(most_stages=30, most_blocks=30), training_problems(most_layers=8)], ids=["copies", "updates"]
)
@given(data=st.data())
def test_random_plans_replay_and_never_beat_the_bound(cases: Any, data: st.DataObject) -> None:
    made, budgets = data.draw(cases)
    timeline = replay_of_random_plan(made, budgets, data.draw(st.integers(0, 2**32)))
    if timeline is None:
        return
    assert timeline.peak_bytes["device"] <= budgets.device_bytes
    assert timeline.iteration_seconds >= lower_bound_seconds(Problem.of(made, budgets)) / SAME


@given(traces())
def test_below_the_floor_nothing_is_planned_and_with_room_for_everything_nothing_moves(made: Trace) -> None:
    roomy = plan(made, Budgets(device_bytes=max(live_bytes(made))), lower_bound=False)
    assert roomy.moves == () and simulate(made, roomy).iteration_seconds == pytest.approx(made.ideal_seconds)
    smallest, stage = floor(made)
    if smallest == 0:
        return
    with pytest.raises(BudgetError, match=f"at least {smallest} bytes") as caught:
        plan(made, Budgets(device_bytes=smallest - 1))
    assert caught.value.smallest_bytes == smallest
    assert caught.value.stage == made.stages[stage].name


@given(problems(), st.integers(0, 200))
def test_budgets_of_the_lower_tiers_hold(case: tuple[Trace, Budgets], storage_bytes: int) -> None:
    limited = case[1].model_copy(update={"host_bytes": 0, "storage_bytes": storage_bytes})
    try:
        found = plan(case[0], limited, time_limit_seconds=60, lower_bound=False)
    except (InfeasiblePlanError, BudgetError):
        return  # too small for what must leave the device
    seconds(case[0], found)


def budgets_for(made: Trace) -> list[Budgets]:
    most, smallest = max(live_bytes(made)), floor(made)[0]
    sizes = {max(smallest, most * share // 100) for share in (100, 90, 70, 50, 30)} | {smallest + smallest // 20}
    return [Budgets(device_bytes=size) for size in sorted(sizes)[:: by_profile(ci=2, long=1)]]


@pytest.mark.parametrize("rate", [1.0, *(pytest.param(rate, marks=pytest.mark.long) for rate in (0.5, 2.0))])
@pytest.mark.parametrize("name", sorted(path.stem for path in HAND.glob("*.json")))
def test_no_policy_beats_the_bound_and_none_the_integer_program(name: str, rate: float) -> None:
    """The bound with blocks as shares and as a whole. Not every policy can plan under every budget."""
    made = hand(name)
    links = tuple(link.model_copy(update={"bytes_per_second": link.bytes_per_second * rate}) for link in made.hardware.links)
    made = made.rebuilt(hardware=made.hardware.model_copy(update={"links": links}))
    compared = 0
    for budgets in budgets_for(made):
        problem = Problem.of(made, budgets)
        bound = max(lower_bound_seconds(problem, max_whole=whole) for whole in (-1, 32))
        found = {}
        for policy in POLICIES if rate == 1.0 else ("ilp", *HEURISTICS):
            try:
                predicted = plan(made, budgets, policy=policy, time_limit_seconds=60, lower_bound=False).predicted
            except (BudgetError, InfeasiblePlanError, UnsupportedError):
                continue
            assert predicted is not None and bound <= predicted.iteration_seconds * SAME, policy
            found[policy] = predicted
        fastest = min(found.values(), key=lambda each: each.iteration_seconds, default=None)
        if fastest is not None and "ilp" in found:
            spared = found["ilp"].storage_written_bytes < fastest.storage_written_bytes
            assert found["ilp"].iteration_seconds <= fastest.iteration_seconds * (1.01 if spared else SAME), found
        compared += len(found)
    assert compared > len(HEURISTICS)


# -- incumbents: with the plan of a tighter problem, more memory, a larger tier or a faster link never gives a slower plan


@given(st.one_of(problems(), training_problems()), st.integers(0, 60), st.integers(0, 100))
def test_more_memory_and_a_larger_tier_never_give_a_slower_plan(case: tuple[Trace, Budgets], more: int, host: int) -> None:
    made, budgets = case
    wider = budgets.model_copy(
        update={
            "device_bytes": budgets.device_bytes + more,
            "host_bytes": None if budgets.host_bytes is None else budgets.host_bytes + host,
        }
    )
    try:
        tight = plan(made, budgets, policy="teraio", lower_bound=False)
    except (BudgetError, InfeasiblePlanError):
        return
    found = plan(made, wider, policy="teraio", incumbents=[tight], lower_bound=False)
    assert found.budgets.device_bytes <= wider.device_bytes
    assert seconds(made, found) <= seconds(made, tight) * SAME


def test_over_a_faster_link_the_plan_for_the_slower_one_is_a_candidate() -> None:
    slow, fast = layers(rate=1.0), layers(rate=1.1)
    budgets = Budgets(device_bytes=31)
    incumbent = plan(slow, budgets, policy="ilp")
    assert incumbent.recompute  # teraio runs nothing again, and waits for the link
    made = plan(fast, budgets, policy="teraio", incumbents=[incumbent])
    assert made.recompute == incumbent.recompute and made.trace_fingerprint == fast.fingerprint
    assert seconds(fast, made) <= seconds(slow, incumbent) * SAME


def test_an_incumbent_keeps_its_budgets_only_where_they_are_no_larger() -> None:
    made = layers(rate=1.0)
    wide = plan(made, Budgets(device_bytes=40))
    found = plan(made, Budgets(device_bytes=31), incumbents=[wide])
    assert found.budgets.device_bytes == 31 and seconds(made, found) > seconds(made, wide)


def test_where_a_policy_finds_no_plan_the_incumbent_is_returned() -> None:
    made = layers(rate=1.0)
    budgets = Budgets(device_bytes=31, storage_bytes=0)
    incumbent = plan(made, budgets)
    with pytest.raises(BudgetError):
        plan(made, budgets, policy="offload-only")
    assert plan(made, budgets, policy="offload-only", incumbents=[incumbent]).recompute == incumbent.recompute
