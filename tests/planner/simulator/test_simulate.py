"""The simulator gives the numbers that are worked out by hand, and refuses wrong plans."""

from collections.abc import Mapping
from typing import Any

import pytest

from planner import Budgets, InfeasiblePlanError, PlanError, Recompute, Timeline, Trace, recomputed, simulate
from planner.problem import Decision, Problem, build_plan, folded
from planner.simulator import critical_path, seconds_by_resource

from ..traces import IN, OUT, Entry, block, by_hand, hand, layers, links, move, staged, trace

CHAIN = hand("chain")


def test_copies_overlap_with_stages() -> None:
    timeline = simulate(CHAIN, by_hand(CHAIN, 20, [move(0, 0, 5, 4)]))
    assert timeline.iteration_seconds == pytest.approx(6.0)
    assert timeline.peak_bytes == {"device": 20, "host": 0, "storage": 10}
    assert timeline.moved_bytes == {"device->storage": 10, "storage->device": 10}
    out, into = timeline.transfers
    assert (out.start_seconds, out.end_seconds) == pytest.approx((1.0, 2.0))
    assert (into.start_seconds, into.end_seconds) == pytest.approx((4.0, 5.0))


def test_memory_over_time() -> None:
    """Activation 0 leaves from 1 s to 2 s while activation 1 is made; its copy in begins at 4 s, when activation 2 dies."""
    timeline = simulate(CHAIN, by_hand(CHAIN, 20, [move(0, 0, 5, 4)]))
    held, after = 0, {}
    for seconds, tier, _, size in timeline.memory:
        if tier == "device":
            held += size
            after[seconds] = held
    assert after == {0.0: 10, 1.0: 20, 2.0: 20, 4.0: 20, 5.0: 10, 6.0: 0}
    assert [change for change in timeline.memory if change[1] != "device"] == [(1.0, "storage", 0, 10), (6.0, "storage", 0, -10)]


def test_a_late_prefetch_stalls_its_stage() -> None:
    timeline = simulate(CHAIN, by_hand(CHAIN, 20, [move(0, 0, 5, 5)]))
    assert [stage.stall_seconds for stage in timeline.stages] == pytest.approx([0, 0, 0, 0, 0, 1])
    assert timeline.stall_seconds == pytest.approx(1.0)


def test_a_late_copy_out_stalls_the_stage_that_needs_the_room() -> None:
    timeline = simulate(CHAIN, by_hand(CHAIN, 20, [move(0, 0, 5, 4, leave=1)]))
    assert [stage.stall_seconds for stage in timeline.stages] == pytest.approx([0, 0, 1, 0, 0, 0])


def test_a_prefetch_that_is_too_early_deadlocks() -> None:
    # Activation 0 comes back during stage 1, when there is room; then stage 2 has none for its output.
    slow = CHAIN.rebuilt(stages=[stage.model_copy(update={"duration_seconds": 2.0}) for stage in CHAIN.stages])
    plan = by_hand(slow, 20, [move(0, 0, 5, 1)])
    with pytest.raises(InfeasiblePlanError, match="waits for ever for 10 bytes") as caught:
        simulate(slow, plan)
    assert caught.value.stage == "forward/2"


def test_queues_out_of_order_deadlock() -> None:
    # Budget for one block: activation 0, first in the queue, takes the room that activation 1 needs.
    moves = [move(0, 0, 5, 4), move(1, 1, 4, 4)]
    with pytest.raises(InfeasiblePlanError, match="waits for ever for block 'activation.1'") as caught:
        simulate(CHAIN, by_hand(CHAIN, 10, moves))
    assert (caught.value.stage, caught.value.block) == ("backward/1", "activation.1")
    assert simulate(CHAIN, by_hand(CHAIN, 10, [move(0, 0, 5, 5), moves[1]])).iteration_seconds == pytest.approx(10)


def test_the_next_stage_goes_before_a_prefetch() -> None:
    # When stage 2 is reached there is room for its output or for the waiting prefetch, not for both.
    timeline = simulate(CHAIN, by_hand(CHAIN, 20, [move(0, 0, 5, 2)]))
    assert timeline.iteration_seconds == pytest.approx(6.0)
    assert timeline.transfers[1].start_seconds == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("name", "budget", "moves", "fields", "message"),
    [
        ("chain", 20, [], {}, "20 of 20 device bytes"),
        ("wrap", 9, [], {}, "10 bytes are on the device when the iteration begins"),
        ("chain", 20, [move(0, 0, 5, 4)], {"storage": 9}, "the storage tier would hold 10 bytes; its budget is 9"),
        ("wrap", 20, [move(0, 2, 6, 5)], {}, "block 'weight' waits in the device tier .* leave it in storage"),
        ("wrap", 20, [move(0, 2, 6, 5, out=False)], {"away": {0: "storage"}}, "no valid copy waits in the storage tier"),
        ("chain", 20, [move(7, 0, 5, 4)], {}, "a move names block 7; the trace has 3"),
        ("chain", 20, [move(0, 0, 4, 4)], {}, "not consecutive uses"),
        ("chain", 20, [move(0, 0, 5, 4), move(0, 0, 5, 5)], {}, "moved twice"),
        ("chain", 20, [move(0, 0, 5, 4, tier="host")], {}, "no link device->host"),
        ("wrap", 25, [], {"away": {7: "storage"}}, "initial names block 7; the trace has 1"),
        ("host_update", 60, [move(0, 0, 1)], {"updates": [{"subgroup": 0, "where": "device"}] * 2}, "subgroup 0 twice"),
    ],
)
def test_what_cannot_be_carried_out(name: str, budget: int, moves: list[Entry], fields: dict[str, Any], message: str) -> None:
    made = hand(name)
    with pytest.raises(InfeasiblePlanError, match=message) as caught:
        simulate(made, by_hand(made, budget, moves, **fields))
    assert moves or name == "wrap" or caught.value.stage == "forward/2"


def test_a_block_that_must_not_move() -> None:
    fixed = CHAIN.rebuilt(blocks=[block.model_copy(update={"movable": False}) for block in CHAIN.blocks])
    with pytest.raises(InfeasiblePlanError, match="not movable"):
        simulate(fixed, by_hand(fixed, 20, [move(0, 0, 5, 4)]))


def test_a_plan_for_another_trace() -> None:
    with pytest.raises(PlanError, match="make a plan from this trace"):
        simulate(hand("wrap"), by_hand(CHAIN, 100, []))


def test_a_link_that_lags_behind_more_and_more_is_followed_to_the_end() -> None:
    """105 bytes a second must leave over a link of 100 bytes a second: at first no stage waits, later all do."""
    made = trace(staged("ffff"), [block(105, [i], [i], "parameter") for i in range(4)], links({OUT: 100.0, IN: 1000.0}))
    problem = Problem.of(made, Budgets(device_bytes=315))
    decisions = {
        index: Decision(tier="storage", leave=period.after, start=period.before - 1)
        for index, period in enumerate(problem.periods)
    }
    timeline = simulate(made, build_plan(problem, decisions, policy="by hand"))
    assert timeline.iteration_seconds == pytest.approx(4.2)


# -- re-runs


def replayed(made: Trace, budget: int, *moves: Entry, again: Mapping[int, int]) -> Timeline:
    """again: the stage before which each group runs again."""
    return simulate(made, by_hand(made, budget, moves, recompute=[{"group": g, "at": at} for g, at in again.items()]))


def test_a_re_run_takes_its_time_and_the_dropped_block_no_memory() -> None:
    timeline = replayed(layers(), 31, again={0: 5})
    assert timeline.iteration_seconds == pytest.approx(7.0)
    assert timeline.peak_bytes["device"] == 30 and timeline.moved_bytes == {}
    assert len(timeline.stages) == 7 and timeline.stall_seconds == 0.0
    with pytest.raises(InfeasiblePlanError):
        replayed(layers(), 31, again={})


def test_a_dropped_block_and_the_one_made_anew_both_may_move() -> None:
    # Derived stages: 0 1 2 | 3 4=forward/0 5=backward/1 6=backward/0. The new a0 waits in storage during stage 5.
    timeline = replayed(layers(), 31, move(0, 4, 6, 6), again={0: 4})
    assert timeline.moved_bytes == {OUT: 10, IN: 10}
    assert {transfer.block for transfer in timeline.transfers} == {0}, "ids are those of the trace"
    assert timeline.iteration_seconds == pytest.approx(7.0 + 1.0)


def test_a_plan_of_the_derived_trace_and_its_folded_form_are_replayed_alike() -> None:
    made, pairs = layers(), (Recompute(group=0, at=4),)
    derived = recomputed(made, pairs)
    found = by_hand(derived, 31, [move(4, 4, 6, 6)])
    one, other = simulate(derived, found), simulate(made, folded(made, pairs, found))
    assert one.stages == other.stages and one.iteration_seconds == other.iteration_seconds
    path = critical_path(made, folded(made, pairs, found), other)
    assert sum(seconds_by_resource(path).values()) == pytest.approx(other.iteration_seconds)
