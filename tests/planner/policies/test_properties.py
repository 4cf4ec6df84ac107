"""For any trace and budget, a plan exists, can be carried out, and does what it predicts."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import BudgetError, Budgets, InfeasiblePlanError, Plan, Trace, floor, plan, simulate
from planner.bound import lower_bound_seconds
from planner.problem import Problem, live_bytes

from ..strategies import problems, random_plan, replay_of_random_plan, traces, training_problems


@given(problems())
def test_every_plan_replays_within_its_budget(case: tuple[Trace, Budgets]) -> None:
    trace, budgets = case
    made = plan(trace, budgets, time_limit_seconds=5)
    assert made.solver.status in ("optimal", "not needed")
    timeline = simulate(trace, made)
    assert timeline.peak_bytes["device"] <= budgets.device_bytes
    assert made.predicted is not None
    assert timeline.iteration_seconds == pytest.approx(made.predicted.iteration_seconds)
    assert timeline.iteration_seconds >= made.predicted.lower_bound_seconds * (1 - 1e-9)


@given(problems(most_stages=30, most_blocks=30))
def test_on_demand_plans_replay_and_never_beat_the_bound(case: tuple[Trace, Budgets]) -> None:
    trace, budgets = case
    timeline = simulate(trace, plan(trace, budgets, policy="belady", lower_bound=False))
    assert timeline.peak_bytes["device"] <= budgets.device_bytes
    assert timeline.iteration_seconds >= lower_bound_seconds(Problem.of(trace, budgets)) * (1 - 1e-9)


@given(problems(most_stages=30, most_blocks=30), st.integers(0, 2**32))
def test_random_plans_replay_and_never_beat_the_bound(case: tuple[Trace, Budgets], seed: int) -> None:
    trace, budgets = case
    timeline = simulate(trace, random_plan(trace, budgets, random.Random(seed)))
    assert timeline.peak_bytes["device"] <= budgets.device_bytes
    assert timeline.iteration_seconds >= lower_bound_seconds(Problem.of(trace, budgets)) * (1 - 1e-9)


@given(training_problems())
def test_every_plan_with_updates_replays_within_its_budgets(case: tuple[Trace, Budgets]) -> None:
    trace, budgets = case
    made = plan(trace, budgets, time_limit_seconds=1)
    timeline = simulate(trace, made)
    assert timeline.peak_bytes["device"] <= budgets.device_bytes
    assert budgets.host_bytes is None or timeline.peak_bytes["host"] <= budgets.host_bytes
    assert {update.subgroup for update in timeline.updates} == {update.subgroup for update in made.updates}
    assert made.predicted is not None
    assert timeline.iteration_seconds == pytest.approx(made.predicted.iteration_seconds)
    assert timeline.iteration_seconds >= made.predicted.lower_bound_seconds * (1 - 1e-9)


@given(training_problems(most_layers=8), st.integers(0, 2**32))
def test_random_plans_with_updates_replay_and_never_beat_the_bound(case: tuple[Trace, Budgets], seed: int) -> None:
    trace, budgets = case
    timeline = replay_of_random_plan(trace, budgets, seed)
    if timeline is None:
        return
    assert timeline.peak_bytes["device"] <= budgets.device_bytes
    assert timeline.iteration_seconds >= lower_bound_seconds(Problem.of(trace, budgets)) * (1 - 1e-9)


@given(traces())
def test_below_the_floor_nothing_is_planned(trace: Trace) -> None:
    smallest, stage = floor(trace)
    if smallest == 0:
        return
    with pytest.raises(BudgetError) as caught:
        plan(trace, Budgets(device_bytes=smallest - 1))
    assert caught.value.smallest_bytes == smallest
    assert caught.value.stage == trace.stages[stage].name


@given(traces())
def test_with_room_for_everything_nothing_moves(trace: Trace) -> None:
    made = plan(trace, Budgets(device_bytes=max(live_bytes(trace))), lower_bound=False)
    assert made.moves == ()
    assert simulate(trace, made).iteration_seconds == pytest.approx(trace.ideal_seconds)


@given(case=problems())
def test_files_give_back_what_was_written(tmp_path_factory: pytest.TempPathFactory, case: tuple[Trace, Budgets]) -> None:
    trace, budgets = case
    made = plan(trace, budgets, policy="belady")
    folder: Path = tmp_path_factory.mktemp("round_trip")
    trace.save(folder / "trace.json")
    made.save(folder / "plan.json")
    assert Trace.load(folder / "trace.json") == trace
    assert Trace.load(folder / "trace.json").fingerprint == trace.fingerprint
    assert Plan.load(folder / "plan.json") == made


@given(problems(), st.integers(0, 200))
def test_budgets_of_the_lower_tiers_hold(case: tuple[Trace, Budgets], storage_bytes: int) -> None:
    trace, budgets = case
    limited = budgets.model_copy(update={"host_bytes": 0, "storage_bytes": storage_bytes})
    try:
        made = plan(trace, limited, time_limit_seconds=5, lower_bound=False)
    except (InfeasiblePlanError, BudgetError):
        return  # too small for what must leave the device
    assert simulate(trace, made).peak_bytes["storage"] <= storage_bytes
