"""Around a copy that is waited for: other blocks, stages, tiers, subgroups that update on the host; after user code."""

import random
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.machines import H200_BF16
from benchmarks.transformer_trace import Model, Workload
from benchmarks.variants import peak_bytes, with_one_tier
from planner import Budgets, InfeasiblePlanError, Trace, plan, simulate
from planner.problem import Decision, Decisions, Problem, build_plan, host_updatable, live_bytes, needed_again, user_stages
from planner.schedule import Breadth, ReplayedPlan, block_exchanges, tier_exchanges, update_exchanges, user_code_proposals

from ..strategies import random_decisions, random_plan, training_problems
from ..traces import IN, OUT, block, hand, hardware, links, staged, subgroup, trace, trained, transformer_trace

BROAD = Breadth(others=6, stages=6, leads=(1.0, 0.0), thorough=True)
NARROW = Breadth(others=1, stages=1, leads=(1.0,), thorough=False)


def seconds(problem: Problem, decisions: Decisions) -> float:
    return ReplayedPlan.of(problem, decisions).timeline.iteration_seconds


def exchanged(problem: Problem, decisions: Decisions, breadth: Breadth = BROAD) -> list[Decisions]:
    return list(block_exchanges(ReplayedPlan.of(problem, decisions), breadth))


def test_a_small_block_leaves_instead_of_a_large_one_where_little_is_missing() -> None:
    """Stage 2 lacks 2 bytes. The program takes 1 s for that; the block of 10 bytes takes 5 s out, the one of 5 bytes 2.5 s."""
    blocks = [block(10, [0], [1, 3]), block(10, [1], [2], dies_after=3), block(5, [1], [3])]
    given_trace = trace(staged("ffff", [2.0, 1.0, 2.0, 2.0], {2: 5}), blocks, links({OUT: 2.0, IN: 10.0}))
    problem = Problem.of(given_trace, Budgets(device_bytes=28))
    assert [period.block for period in problem.periods] == [0, 1, 2]
    large = {0: Decision(tier="storage", leave=1, start=3)}
    small = {2: Decision(tier="storage", leave=1, start=2)}
    assert seconds(problem, large) == pytest.approx(13.0)
    assert seconds(problem, small) == pytest.approx(10.0)
    for breadth in (BROAD, NARROW):
        assert any(found.keys() == {2} for found in exchanged(problem, large, breadth))
    made = plan(problem.source, problem.budgets)
    assert made.predicted is not None and made.predicted.iteration_seconds == pytest.approx(10.0)


def test_all_variants_can_be_carried_out_and_some_are_better() -> None:
    made = transformer_trace(layers=2, stages_per_layer=4, rate=2e9)
    problem = Problem.of(made, Budgets(device_bytes=max(live_bytes(made)) // 2))
    decisions = {
        problem.period_after[move.block, move.after]: Decision(
            tier=move.tier,
            leave=move.offload.start if move.offload else move.after,
            start=move.prefetch.start if move.prefetch else move.before,
        )
        for move in plan(made, problem.budgets, policy="belady", lower_bound=False).moves
    }
    found = exchanged(problem, decisions)
    assert len(found) > 50
    assert all(max(problem.occupancy(each)) <= problem.budgets.device_bytes for each in found)
    assert min(seconds(problem, each) for each in found) < seconds(problem, decisions)


# -- other tiers


def two_blocks(host_bytes: int) -> Problem:
    """Block 0 is made in stage 0 and needed in stage 5, block 1 in stages 1 and 8. The host is ten times as fast as the drive."""
    rates = {
        f"{a}->{b}": 100.0 if "host" in (a, b) else 10.0
        for tier in ("host", "storage")
        for a, b in permutations(("device", tier))
    }
    made = trace(staged("f" * 9), [block(30, [n], [5 + 3 * n]) for n in range(2)], links(rates))
    return Problem.of(made, Budgets(device_bytes=60, host_bytes=host_bytes))


def test_a_late_block_changes_places_with_one_that_has_time() -> None:
    """Block 0 goes to the drive in stages 1 to 3 and is queued back in stage 4: it is there at 7, two seconds late."""
    problem = two_blocks(host_bytes=30)
    decisions = {0: Decision(tier="storage", leave=0, start=4), 1: Decision(tier="host", leave=1, start=3)}
    made = ReplayedPlan.of(problem, decisions)
    assert made.timeline.iteration_seconds == 11.0
    found = list(tier_exchanges(made))
    assert {index: decision.tier for index, decision in found[0].items()} == {0: "host", 1: "storage"}
    swapped = {0: found[0][0], 1: Decision(tier="storage", leave=1, start=5)}
    assert seconds(problem, swapped) == 9.0


# -- other updates on the host


def test_a_plan_with_other_updates_is_closer_to_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Llama of seven layers in bf16, with host memory as the only lower tier.

    By the coarse program alone, no subgroup updates on the host, and the iteration takes 1.139 times the bound.
    """
    monkeypatch.setattr("planner.policies.predictions.more_instants", lambda stages: ())  # this bound is enough
    sizes = {"layers": 7, "width": 2048, "heads": 32, "key_value_heads": 8, "feed_forward": 8192, "vocabulary": 32000}
    workload = Workload(model=Model(name="seven layers", loss_tokens=2048, **sizes), batch=4, sequence=2048, element_bytes=2)
    made = with_one_tier(workload.trace(H200_BF16), "host", H200_BF16.host_bytes_per_second)
    predicted = plan(made, Budgets(device_bytes=peak_bytes(made) // 2, host_bytes=96 << 30)).predicted
    assert predicted is not None
    assert predicted.iteration_seconds < 1.12 * predicted.lower_bound_seconds


@given(training_problems(), st.randoms(use_true_random=False))
def test_sets_of_updates_differ_by_one_subgroup(case: tuple[Trace, Budgets], draw: random.Random) -> None:
    given_trace, budgets = case
    updatable = {each.id for each in host_updatable(given_trace)}
    made = random_plan(given_trace, budgets, draw)
    problem = Problem.of(given_trace, budgets, [update.subgroup for update in made.updates if update.where == "host"])
    now = frozenset(problem.on_host)
    replayed = ReplayedPlan(problem=problem, decisions={}, plan=made, timeline=simulate(given_trace, made))
    for other in update_exchanges(replayed):
        assert other != now and other <= updatable
        assert len(other - now) <= 1 and len(now - other) <= 1
        for came, went in zip(other - now, now - other, strict=False):
            one, two = given_trace.subgroups[came], given_trace.subgroups[went]
            assert one.host_seconds is not None and two.host_seconds is not None
            assert 0.6 < one.host_seconds / two.host_seconds < 1.6
            assert needed_again(given_trace, one) > one.stage


# -- copies that user code would wait for are put off where there is room, and only if the replay finds that better


def proposed(problem: Problem, decisions: Decisions) -> list[tuple[Problem, Decisions]]:
    return list(user_code_proposals(ReplayedPlan.of(problem, decisions)))


def user_code(workspace: int = 0) -> Problem:
    """The hand-made trace; `workspace` of stage 0, user code."""
    made = hand("user_code")
    first, *others = made.stages
    made = made.rebuilt(stages=(first.model_copy(update={"workspace_bytes": workspace}), *others))
    return Problem.of(made, Budgets(device_bytes=20))


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
    assert len(proposed(user_code(workspace), {0: Decision(tier="storage", leave=5, start=10)})) == count


def layer(workspace: int = 0) -> Trace:
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
        tight = Problem.of(layer(workspace), Budgets(device_bytes=max(problem.live_bytes)), [0])
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
