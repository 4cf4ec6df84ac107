"""Blocks that outlive their last use, such as gradients that user code frees after the optimizer's step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner import Budgets, InfeasiblePlanError, Plan, Trace, TraceError, floor, inactive_periods, plan, simulate
from planner.problem import Problem, host_updatable, live_bytes

from ..strategies import hardware


def trace_of(*blocks: dict[str, Any], workspaces: tuple[int, ...] = (0, 0, 0, 0, 0), **fields: Any) -> Trace:
    """Stages of 1 s; both links carry 10 bytes per second."""
    stages = [
        {"id": n, "name": f"s{n}", "phase": "backward", "duration_seconds": 1.0, "workspace_bytes": size}
        for n, size in enumerate(workspaces)
    ]
    common = {"kind": "gradient", "size_bytes": 10, "persistent": False}
    numbered = [{"id": number, "name": f"b{number}", **common, **block} for number, block in enumerate(blocks)]
    machine = fields.pop("hardware", hardware(rate=10.0))
    return Trace.build(name="made", hardware=machine, stages=stages, blocks=numbered, **fields)


def leaves(block: int, after: int, before: int, start: int | None) -> dict[str, Any]:
    """A move without a prefetch. start: the stage at whose end the block is copied out; None if it is dropped."""
    offload = None if start is None else {"start": start, "free_after": start}
    return {"block": block, "after": after, "before": before, "tier": "storage", "offload": offload, "prefetch": None}


def made(trace: Trace, device_bytes: int, *moves: dict[str, Any]) -> Plan:
    budgets = Budgets(device_bytes=device_bytes)
    return Plan.model_validate({"trace_fingerprint": trace.fingerprint, "policy": "by hand", "budgets": budgets, "moves": moves})


def test_it_lives_until_then_and_may_leave_for_good() -> None:
    trace = trace_of({"reads": [1], "writes": [0], "dies_after": 3})
    assert live_bytes(trace) == [10, 10, 10, 10, 0]
    (period,) = inactive_periods(trace)
    assert (period.after, period.before, period.final, period.clean, period.last_leave) == (1, 4, True, True, 2)
    (written,) = inactive_periods(trace_of({"reads": [], "writes": [0, 1], "dies_after": 3}))
    assert not written.clean
    assert floor(trace_of({"reads": [1], "writes": [0], "dies_after": 3}, workspaces=(0, 0, 0, 25, 0))) == (25, 3)


@pytest.mark.parametrize("policy", ["ilp", "device-updates", "teraio", "g10", "belady", "zero-infinity"])
def test_every_policy_makes_room_and_brings_nothing_back(policy: str) -> None:
    """The last use writes the block, so it must be copied out. That takes 1 s, and nothing hides it."""
    trace = trace_of({"reads": [], "writes": [0, 1], "dies_after": 4}, workspaces=(0, 0, 10, 0, 0))
    found = plan(trace, Budgets(device_bytes=15), policy=policy)
    timeline = simulate(trace, found)
    assert [move.prefetch for move in found.moves] == [None]
    assert timeline.moved_bytes == {"device->storage": 10} and timeline.peak_bytes["storage"] == 10
    assert timeline.iteration_seconds == pytest.approx(6.0)
    assert found.predicted is not None and found.predicted.lower_bound_seconds <= 6.0


def test_one_that_is_not_used_again_goes_before_one_that_is() -> None:
    trace = trace_of(
        {"reads": [1], "writes": [0], "dies_after": 4},
        {"reads": [4], "writes": [1]},
        workspaces=(0, 0, 0, 10, 0),
    )
    (move,) = plan(trace, Budgets(device_bytes=20), policy="belady").moves
    assert move.block == 0


def test_one_that_dies_on_its_way_out_takes_its_room_until_it_is_out() -> None:
    """The copy is queued when stage 3 has ended and takes 6 s. Stage 0 makes the block anew and waits for it."""
    trace = trace_of({"reads": [1], "writes": [0], "size_bytes": 60, "dies_after": 4}, workspaces=(0, 0, 0, 0, 5))
    timeline = simulate(trace, made(trace, 65, leaves(0, 1, 5, 3)))
    assert timeline.iteration_seconds == pytest.approx(5.0 + 5.0)
    assert timeline.peak_bytes == {"device": 65, "host": 0, "storage": 60}


def test_a_copy_that_another_stage_has_made_serves() -> None:
    trace = trace_of({"reads": [2], "writes": [0], "dies_after": 4}, workspaces=(0, 0, 0, 10, 0))
    way = {"start": 0, "free_after": 0}
    back = {"block": 0, "after": 0, "before": 2, "tier": "storage", "offload": way, "prefetch": {"start": 2, "ready_by": 2}}
    timeline = simulate(trace, made(trace, 15, back, leaves(0, 2, 5, None)))
    assert timeline.moved_bytes == {"device->storage": 10, "storage->device": 10}
    with pytest.raises(InfeasiblePlanError, match="no valid copy"):
        simulate(trace, made(trace, 15, leaves(0, 2, 5, None)))


@pytest.mark.parametrize("move", [leaves(0, 1, 5, 4), leaves(0, 1, 4, 1), leaves(0, 0, 5, 1), leaves(1, 1, 5, 1)])
def test_moves_for_good_that_the_trace_does_not_allow(move: dict[str, Any]) -> None:
    """The block dies then anyway; `before` is not its death; `after` is not its last use; the block dies with its last use."""
    trace = trace_of({"reads": [1], "writes": [0], "dies_after": 4}, {"reads": [1], "writes": [0]})
    with pytest.raises(InfeasiblePlanError, match="blocks may leave for good between their last use and their death"):
        simulate(trace, made(trace, 100, move))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dies_after": 1}, "dies after stage 1"),
        ({"dies_after": 3, "persistent": True}, "only one that is not persistent"),
        ({"dies_after": 5}, "the last stage is 4"),
    ],
)
def test_deaths_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        trace_of({"reads": [1], "writes": [0], **change})


def test_only_a_death_that_is_given_is_part_of_the_content(tmp_path: Path) -> None:
    without, given = trace_of({"reads": [1], "writes": [0]}), trace_of({"reads": [1], "writes": [0], "dies_after": 4})
    assert "dies_after" not in without.model_dump_json() and without.fingerprint != given.fingerprint
    given.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == given


def test_an_update_on_the_host_takes_it_for_good() -> None:
    """The gradient stays on the host until the update, whenever it would die."""
    trace = trace_of(
        {"kind": "parameter", "persistent": True, "reads": [0, 2], "writes": [2]},
        {"reads": [2], "writes": [0], "dies_after": 4},
        hardware=hardware(host=True, rate=10.0),
        subgroups=[{"id": 0, "stage": 2, "blocks": [0, 1], "elements": 2, "device_seconds": 1.0, "host_seconds": 0.5}],
    )
    assert [subgroup.id for subgroup in host_updatable(trace)] == [0]
    problem = Problem.of(trace, Budgets(device_bytes=100), [0])
    assert problem.live_bytes == (20, 10, 10, 10, 10) and not any(period.final for period in problem.periods)
    found = plan(trace, Budgets(device_bytes=20), policy="host-updates")
    assert [(move.block, move.before) for move in found.moves if move.prefetch is None] == [(1, 2)]
    assert simulate(trace, found).peak_bytes["device"] <= 20
