"""Blocks for which a stage waits come from another tier, alone or in exchange for blocks with time to spare."""

from typing import Any

from planner import Budgets, Trace
from planner.problem import Decision, Decisions, Problem
from planner.schedule import ReplayedPlan, tier_exchanges


def two_blocks(host_bytes: int) -> Problem:
    """Block 0 is made in stage 0 and needed in stage 5, block 1 in stages 1 and 8. The host is ten times as fast as the drive."""
    each: dict[str, Any] = {"phase": "forward", "duration_seconds": 1.0, "workspace_bytes": 0}
    stages = [{"id": s, "name": f"s{s}", **each} for s in range(9)]
    kind: dict[str, Any] = {"kind": "activation", "size_bytes": 30, "persistent": False}
    blocks = [{"id": b, "name": f"b{b}", **kind, "writes": [b], "reads": [5 + 3 * b]} for b in range(2)]
    rates = {"host": 100.0, "storage": 10.0}
    links = [
        {"from": ends[0], "to": ends[1], "bytes_per_second": rate}
        for tier, rate in rates.items()
        for ends in (("device", tier), (tier, "device"))
    ]
    machine = {"name": "made up", "device_memory_bytes": 100, "links": links}
    trace = Trace.model_validate({"name": "two blocks", "hardware": machine, "stages": stages, "blocks": blocks})
    return Problem.of(trace, Budgets(device_bytes=60, host_bytes=host_bytes))


def seconds(problem: Problem, decisions: Decisions) -> float:
    return ReplayedPlan.of(problem, decisions).timeline.iteration_seconds


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


def test_nothing_is_exchanged_where_nothing_waits() -> None:
    problem = two_blocks(host_bytes=60)
    decisions = {0: Decision(tier="host", leave=0, start=4), 1: Decision(tier="host", leave=1, start=3)}
    assert list(tier_exchanges(ReplayedPlan.of(problem, decisions))) == []
