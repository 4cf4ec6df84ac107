"""Copies that user code would wait for are put off where there is room, and only if the replay finds that better."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import Budgets, InfeasiblePlanError, Trace, simulate
from planner.problem import Decision, Decisions, Problem, build_plan, user_stages
from planner.schedule import ReplayedPlan, user_code_proposals

from ..strategies import random_decisions, training_problems
from ..traces import block, hand, hardware, staged, subgroup, trace, trained


def proposed(problem: Problem, decisions: Decisions) -> list[tuple[Problem, Decisions]]:
    return list(user_code_proposals(ReplayedPlan.of(problem, decisions)))


def seconds(problem: Problem, decisions: Decisions) -> float:
    return simulate(problem.source, build_plan(problem, decisions, policy="by hand")).iteration_seconds


def user_code(*, workspace: int = 0, budget: int = 20) -> Problem:
    """The hand-made trace; `workspace` of stage 0, user code."""
    made = hand("user_code")
    first, *others = made.stages
    made = made.rebuilt(stages=(first.model_copy(update={"workspace_bytes": workspace}), *others))
    return Problem.of(made, Budgets(device_bytes=budget))


def test_a_copy_out_is_put_off_until_user_code_has_ended() -> None:
    problem = user_code()
    before: Decisions = {0: Decision(tier="storage", leave=5, start=10)}
    ((_, after),) = proposed(problem, before)
    assert after == {0: replace(before[0], leave=6)}
    assert (seconds(problem, before), seconds(problem, after)) == (7.0, 6.0)
    assert proposed(problem, after) == []


@pytest.mark.parametrize(("workspace", "count"), [(10, 1), (11, 0)])
def test_only_where_there_is_room(workspace: int, count: int) -> None:
    """The state takes 10 of 20 bytes for one stage more."""
    assert len(proposed(user_code(workspace=workspace), {0: Decision(tier="storage", leave=5, start=10)})) == count


def layer(*, workspace: int = 0) -> Trace:
    """Two gradients of 20 bytes are born in stages 2 and 3; user code, then both subgroups update; 10 bytes a second.

    All stages take 1 s, but for the second update: 3 s. `workspace`: of stage 4, user code.
    """
    blocks = [each for number in range(2) for each in trained((20, 20, 40), [1, 3 - number], 3 - number, 5 + number)]
    return trace(
        staged("ufbbuoo", [1.0] * 6 + [3.0], {4: workspace}),
        blocks,
        hardware(host=True, rate=2.5),
        subgroups=[subgroup(5 + number, range(3 * number, 3 * number + 3)) for number in range(2)],
    )


def test_gradients_of_updates_on_the_host_are_put_off_too() -> None:
    made = layer()
    problem = Problem.of(made, Budgets(device_bytes=1000), [0])
    assert problem.with_gradient_leaves({1: 4}).live_bytes == tuple(
        live + 20 * (stage == 4) for stage, live in enumerate(problem.live_bytes)
    )
    decisions: Decisions = {
        index: Decision(tier="host", leave=problem.periods[index].after, start=problem.periods[index].before)
        for index in problem.updated
    }
    put_off = [each for each, _ in proposed(problem, decisions) if each.gradient_leaves == {1: 4}]
    assert put_off
    timelines = [simulate(made, build_plan(each, decisions, policy="by hand")) for each in (problem, put_off[0])]
    assert timelines[0].stages[4].stall_seconds == pytest.approx(2.0) and timelines[1].stages[4].stall_seconds == 0
    assert timelines[1].iteration_seconds == pytest.approx(timelines[0].iteration_seconds - 2.0)
    for workspace, room in ((20, True), (21, False)):  # the parameter has left 20 bytes
        tight = Problem.of(layer(workspace=workspace), Budgets(device_bytes=max(problem.live_bytes)), [0])
        assert any(each.gradient_leaves for each, _ in proposed(tight, decisions)) == room


def test_a_copy_in_under_way_begins_after_user_code() -> None:
    """User code in stage 2 would wait 1.5 s for the copy in of a parameter of 25 bytes that is queued in stage 1."""
    made = trace(staged("ofuffff"), [block(25, [], [6], "parameter")])
    problem = Problem.of(made, Budgets(device_bytes=30))
    before: Decisions = {0: Decision(tier="storage", leave=6, start=8)}
    ((_, after),) = proposed(problem, before)
    assert after == {0: replace(before[0], start=10)}
    assert (seconds(problem, before), seconds(problem, after)) == (8.5, 7.0)


@given(training_problems(most_layers=4), st.integers(0, 2**32))
def test_every_proposal_can_be_carried_out(case: tuple[Trace, Budgets], seed: int) -> None:
    made, budgets = case
    try:
        whole, start = random_decisions(made, budgets, random.Random(seed))
        found = proposed(whole, start)
    except InfeasiblePlanError:
        assert budgets.host_bytes is not None  # too small for what has to move
        return
    assert user_stages(made) or not found
    for problem, decisions in found:
        assert max(problem.occupancy(decisions)) <= budgets.device_bytes
        timeline = simulate(made, build_plan(problem, decisions, policy="proposed"))
        assert timeline.peak_bytes["device"] <= budgets.device_bytes
