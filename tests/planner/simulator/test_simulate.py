"""The simulator gives the numbers that are worked out by hand, and refuses wrong plans."""

from pathlib import Path
from typing import Any

import pytest

from planner import Budgets, InfeasiblePlanError, Plan, PlanError, Trace, simulate
from planner.problem import Decision, Problem, build_plan

HAND = Path(__file__).parents[3] / "traces" / "hand"


def made(trace: Trace, device_bytes: int, moves: list[dict[str, Any]], **fields: Any) -> Plan:
    content = {
        "trace_fingerprint": trace.fingerprint,
        "policy": "by hand",
        "budgets": Budgets(device_bytes=device_bytes, storage_bytes=fields.pop("storage_bytes", None)),
        "moves": moves,
        **fields,
    }
    return Plan.model_validate(content)


def move(block: int, after: int, before: int, start: int, *, leave: int | None = None) -> dict[str, Any]:
    """A move to storage that copies out after stage `leave` (default: at once) and in from `start` on."""
    leave = after if leave is None else leave
    return {
        "block": block,
        "after": after,
        "before": before,
        "tier": "storage",
        "offload": {"start": leave, "free_after": leave},
        "prefetch": {"start": start, "ready_by": before},
    }


@pytest.fixture
def chain() -> Trace:
    return Trace.load(HAND / "chain.json")


@pytest.fixture
def wrap() -> Trace:
    return Trace.load(HAND / "wrap.json")


def test_copies_overlap_with_stages(chain: Trace) -> None:
    timeline = simulate(chain, made(chain, 20, [move(0, 0, 5, 4)]))
    assert timeline.iteration_seconds == pytest.approx(6.0)
    assert timeline.peak_bytes == {"device": 20, "host": 0, "storage": 10}
    assert timeline.moved_bytes == {"device->storage": 10, "storage->device": 10}
    out, into = timeline.transfers
    assert (out.start_seconds, out.end_seconds) == pytest.approx((1.0, 2.0))
    assert (into.start_seconds, into.end_seconds) == pytest.approx((4.0, 5.0))


def test_memory_over_time(chain: Trace) -> None:
    """Activation 0 leaves from 1 s to 2 s while activation 1 is made; its copy in begins at 4 s, when activation 2 dies."""
    timeline = simulate(chain, made(chain, 20, [move(0, 0, 5, 4)]))
    held, after = 0, {}
    for seconds, _, size in timeline.memory:
        held += size
        after[seconds] = held
    assert {kind for _, kind, _ in timeline.memory} == {"activation"}
    assert after == {0.0: 10, 1.0: 20, 2.0: 20, 4.0: 20, 5.0: 10, 6.0: 0}


def test_memory_begins_with_what_stays_from_the_iteration_before(wrap: Trace) -> None:
    memory = simulate(wrap, made(wrap, 25, [])).memory
    assert memory == ((0.0, "parameter", 10), (0.0, "workspace", 15), (1.0, "workspace", -15))


def test_a_late_prefetch_stalls_its_stage(chain: Trace) -> None:
    timeline = simulate(chain, made(chain, 20, [move(0, 0, 5, 5)]))
    assert [stage.stall_seconds for stage in timeline.stages] == pytest.approx([0, 0, 0, 0, 0, 1])
    assert timeline.stall_seconds == pytest.approx(1.0)


def test_a_late_copy_out_stalls_the_stage_that_needs_the_room(chain: Trace) -> None:
    timeline = simulate(chain, made(chain, 20, [move(0, 0, 5, 4, leave=1)]))
    assert [stage.stall_seconds for stage in timeline.stages] == pytest.approx([0, 0, 1, 0, 0, 0])


def test_an_early_prefetch_that_fits_waits_for_room_and_does_no_harm(chain: Trace) -> None:
    # Queued at stage 3, where activations 1 and 2 fill the budget: it waits at the head of its queue.
    timeline = simulate(chain, made(chain, 20, [move(0, 0, 5, 3)]))
    assert timeline.iteration_seconds == pytest.approx(6.0)
    assert timeline.transfers[1].queued_seconds == pytest.approx(3.0)
    assert timeline.transfers[1].start_seconds == pytest.approx(4.0)


def test_a_prefetch_that_is_too_early_deadlocks(chain: Trace) -> None:
    # Activation 0 comes back during stage 1, when there is room; then stage 2 has none for its output.
    roomy = [{**stage.model_dump(), "duration_seconds": 2.0} for stage in chain.stages]
    slow = Trace.model_validate({**chain.model_dump(by_alias=True), "stages": roomy})
    plan = made(slow, 20, [move(0, 0, 5, 1)])
    with pytest.raises(InfeasiblePlanError, match="waits for ever for 10 bytes") as caught:
        simulate(slow, plan)
    assert caught.value.stage == "forward/2"


def test_queues_out_of_order_deadlock(chain: Trace) -> None:
    # Budget for one block: activation 0, first in the queue, takes the room that activation 1 needs.
    moves = [move(0, 0, 5, 4), move(1, 1, 4, 4)]
    with pytest.raises(InfeasiblePlanError, match="waits for ever for block 'activation.1'") as caught:
        simulate(chain, made(chain, 10, moves))
    assert (caught.value.stage, caught.value.block) == ("backward/1", "activation.1")
    assert simulate(chain, made(chain, 10, [move(0, 0, 5, 5), moves[1]])).iteration_seconds == pytest.approx(10)


def test_the_next_stage_goes_before_a_prefetch(chain: Trace) -> None:
    # When stage 2 is reached there is room for its output or for the waiting prefetch, not for both.
    timeline = simulate(chain, made(chain, 20, [move(0, 0, 5, 2)]))
    assert timeline.iteration_seconds == pytest.approx(6.0)
    assert timeline.transfers[1].start_seconds == pytest.approx(4.0)


def test_over_budget_without_moves(chain: Trace) -> None:
    with pytest.raises(InfeasiblePlanError, match="20 of 20 device bytes") as caught:
        simulate(chain, made(chain, 20, []))
    assert caught.value.stage == "forward/2"


def test_over_budget_at_the_border(wrap: Trace) -> None:
    with pytest.raises(InfeasiblePlanError, match="10 bytes are on the device when the iteration begins"):
        simulate(wrap, made(wrap, 9, []))


def test_over_the_storage_budget(chain: Trace) -> None:
    with pytest.raises(InfeasiblePlanError, match="the storage tier would hold 10 bytes; its budget is 9"):
        simulate(chain, made(chain, 20, [move(0, 0, 5, 4)], storage_bytes=9))


def test_not_cyclic(wrap: Trace) -> None:
    with pytest.raises(InfeasiblePlanError, match="waits in the device tier .* leave it in storage") as caught:
        simulate(wrap, made(wrap, 20, [move(0, 2, 6, 5)]))
    assert caught.value.block == "weight"


def test_dropping_what_has_no_valid_copy(wrap: Trace) -> None:
    dropped = {**move(0, 2, 6, 5), "offload": None}
    with pytest.raises(InfeasiblePlanError, match="no valid copy waits in the storage tier"):
        simulate(wrap, made(wrap, 20, [dropped], initial=[{"block": 0, "tier": "storage"}]))


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ([move(7, 0, 5, 4)], "a move names block 7; the trace has 3"),
        ([move(0, 0, 4, 4)], "not consecutive uses"),
        ([move(0, 0, 5, 4), move(0, 0, 5, 5)], "moved twice"),
        ([{**move(0, 0, 5, 4), "tier": "host"}], "no link device->host"),
    ],
)
def test_moves_that_do_not_fit_the_trace(chain: Trace, moves: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InfeasiblePlanError, match=message):
        simulate(chain, made(chain, 20, moves))


def test_a_block_that_must_not_move(chain: Trace) -> None:
    fixed = [{**block.model_dump(), "movable": False} for block in chain.blocks]
    trace = Trace.model_validate({**chain.model_dump(by_alias=True), "blocks": fixed})
    with pytest.raises(InfeasiblePlanError, match="not movable"):
        simulate(trace, made(trace, 20, [move(0, 0, 5, 4)]))


def test_a_plan_for_another_trace(chain: Trace, wrap: Trace) -> None:
    with pytest.raises(PlanError, match="plan again"):
        simulate(wrap, made(chain, 100, []))


def test_a_link_that_lags_behind_more_and_more_is_followed_to_the_end() -> None:
    """105 bytes a second must leave over a link of 100 bytes a second: at first no stage waits, later all do."""
    blocks = [
        {
            "id": i,
            "name": f"b{i}",
            "kind": "parameter",
            "size_bytes": 105,
            "persistent": True,
            "reads": [i],
            "writes": [i],
        }
        for i in range(4)
    ]
    links = [
        {"from": "device", "to": "storage", "bytes_per_second": 100.0},
        {"from": "storage", "to": "device", "bytes_per_second": 1000.0},
    ]
    trace = Trace.model_validate(
        {
            "name": "lag",
            "hardware": {"name": "made up", "device_memory_bytes": 1000, "links": links},
            "stages": [{"id": i, "name": f"s{i}", "phase": "forward", "duration_seconds": 1.0} for i in range(4)],
            "blocks": blocks,
        }
    )
    problem = Problem.of(trace, Budgets(device_bytes=315))
    decisions = {
        index: Decision(tier="storage", leave=period.after, start=period.before - 1)
        for index, period in enumerate(problem.periods)
    }
    timeline = simulate(trace, build_plan(problem, decisions, policy="by hand"))
    assert timeline.iteration_seconds == pytest.approx(4.2)
