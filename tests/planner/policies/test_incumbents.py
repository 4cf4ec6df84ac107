"""More memory, a larger tier or a faster link never gives a slower plan, if the plan of the tighter problem is an incumbent."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import BudgetError, Budgets, InfeasiblePlanError, Plan, Trace, floor, plan, simulate
from planner.problem import live_bytes

from ..recompute_traces import layers
from ..strategies import problems, training_problems, transformer_trace

SAME = 1 + 1e-9


def seconds(trace: Trace, made: Plan) -> float:
    """The replayed time, which must be the predicted one, within the plan's own budgets."""
    timeline = simulate(trace, made)
    assert made.predicted is not None
    assert timeline.iteration_seconds == pytest.approx(made.predicted.iteration_seconds, rel=1e-9)
    assert timeline.peak_bytes["device"] <= made.budgets.device_bytes
    return timeline.iteration_seconds


@given(problems(), st.integers(1, 4))
def test_more_memory_never_gives_a_slower_plan(case: tuple[Trace, Budgets], steps: int) -> None:
    trace, budgets = case
    least, most = budgets.device_bytes, max(live_bytes(trace))
    before: Plan | None = None
    for step in range(steps + 1):
        wider = Budgets(device_bytes=least + (most - least) * step // steps)
        incumbents = () if before is None else (before,)
        made = plan(trace, wider, policy="teraio", incumbents=incumbents, lower_bound=False)
        assert made.budgets.device_bytes <= wider.device_bytes
        assert before is None or seconds(trace, made) <= seconds(trace, before) * SAME
        before = made


@given(st.one_of(problems(), training_problems()), st.integers(1, 4))
def test_plans_made_apart_differ_by_no_more_than_their_distance_from_the_bound(
    case: tuple[Trace, Budgets], quarters: int
) -> None:
    """Without incumbents too: the bound of more memory is above no plan for less."""
    trace, budgets = case
    try:
        tight = plan(trace, budgets)
    except (BudgetError, InfeasiblePlanError):
        return
    more = max(max(live_bytes(trace)) - budgets.device_bytes, 0) * quarters // 4
    made = plan(trace, budgets.model_copy(update={"device_bytes": budgets.device_bytes + more}))
    assert made.predicted is not None
    assert made.predicted.lower_bound_seconds <= seconds(trace, tight) * SAME


@given(training_problems(), st.integers(0, 100))
def test_a_larger_tier_never_gives_a_slower_plan(case: tuple[Trace, Budgets], more: int) -> None:
    trace, budgets = case
    wider = budgets.model_copy(update={"host_bytes": None if budgets.host_bytes is None else budgets.host_bytes + more})
    try:
        tight = plan(trace, budgets, policy="teraio", lower_bound=False)
    except (BudgetError, InfeasiblePlanError):
        return
    made = plan(trace, wider, policy="teraio", incumbents=[tight], lower_bound=False)
    assert seconds(trace, made) <= seconds(trace, tight) * SAME


def test_over_a_faster_link_the_plan_for_the_slower_one_is_a_candidate() -> None:
    slow, fast = layers(rate=1.0), layers(rate=1.1)
    budgets = Budgets(device_bytes=31)
    incumbent = plan(slow, budgets, policy="ilp")
    assert incumbent.recompute  # teraio runs nothing again, and waits for the link
    made = plan(fast, budgets, policy="teraio", incumbents=[incumbent])
    assert made.recompute == incumbent.recompute and made.trace_fingerprint == fast.fingerprint
    assert seconds(fast, made) <= seconds(slow, incumbent) * SAME
    assert made.predicted is not None and made.predicted.lower_bound_seconds <= made.predicted.iteration_seconds * SAME


def test_an_incumbent_keeps_its_budgets_only_where_they_are_no_larger() -> None:
    trace = layers(rate=1.0)
    wide = plan(trace, Budgets(device_bytes=40))
    made = plan(trace, Budgets(device_bytes=31), incumbents=[wide])
    assert made.budgets.device_bytes == 31 and seconds(trace, made) > seconds(trace, wide)


def test_where_a_policy_finds_no_plan_the_incumbent_is_returned() -> None:
    trace = layers(rate=1.0)
    budgets = Budgets(device_bytes=31, storage_bytes=0)
    incumbent = plan(trace, budgets)
    with pytest.raises(BudgetError):
        plan(trace, budgets, policy="offload-only")
    assert plan(trace, budgets, policy="offload-only", incumbents=[incumbent]).recompute == incumbent.recompute


@pytest.mark.parametrize(
    "trace", [transformer_trace(layers=2, stages_per_layer=4, rate=4e9), layers(4, rate=2.0)], ids=("transformer", "layers")
)
def test_over_a_range_of_budgets_more_memory_is_never_slower(trace: Trace) -> None:
    least, most = floor(trace)[0], max(live_bytes(trace))
    made: list[Plan] = []
    for step in range(5):
        budgets = Budgets(device_bytes=least + (most - least) * step // 4)
        made.append(plan(trace, budgets, incumbents=made[-1:], lower_bound=False))
    times = [seconds(trace, each) for each in made]
    assert all(more <= less * SAME for less, more in pairwise(times))
    assert times[-1] == pytest.approx(trace.ideal_seconds)
