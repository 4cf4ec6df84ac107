"""The iteration of a plan over time, as the simulator replays it: stages, copies, updates, memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import planner
from planner.problem import live_bytes
from planner.schema import Budgets, FrozenModel, Phase, Plan, Trace
from planner.simulator import MemoryChange, Timeline, Transfer
from teraio.cli.plan_summary import MoveSummary, summarise_moves
from teraio.cli.tables import format_bytes

__all__ = ["CopyRow", "MemoryRows", "StageRow", "TimelineRows", "UpdateRow", "timeline_rows"]

_KINDS = ("parameter", "gradient", "optimizer_state", "activation", "buffer", "workspace")
"""From the bottom of the stack to its top."""


class StageRow(FrozenModel):
    """A stage, in seconds from the iteration's begin. It waits from `reached` to `start`; `waits_for`: what ended then."""

    name: str
    phase: Phase
    reached: float
    start: float
    end: float
    waits_for: str = ""


class CopyRow(FrozenModel):
    """A copy of a block over a link. A copy that began in the iteration before has a negative `start`. `why`: it is made."""

    link: str
    block: int
    name: str
    kind: str
    size_bytes: int
    queued: float
    start: float
    end: float
    why: str


class UpdateRow(FrozenModel):
    """The update of an optimizer subgroup on the host's processor."""

    subgroup: int
    name: str
    start: float
    end: float


class MemoryRows(FrozenModel):
    """The device's memory over time. Each of `points`: seconds, then the bytes of each of `kinds` from then on."""

    kinds: tuple[str, ...]
    seconds: float
    points: tuple[tuple[float, ...], ...]


class TimelineRows(FrozenModel):
    """One iteration of the steady state. `unplanned`: the memory of an iteration in which nothing ever leaves the device."""

    seconds: float
    budget_bytes: int
    links: tuple[str, ...]
    stages: tuple[StageRow, ...]
    copies: tuple[CopyRow, ...]
    updates: tuple[UpdateRow, ...]
    memory: MemoryRows
    unplanned: MemoryRows


def timeline_rows(plan: Plan, trace: Trace) -> TimelineRows:
    """Replay the plan. Raises PlanError if it does not belong to the trace, InfeasiblePlanError if it cannot be carried out."""
    replayed = planner.simulate(trace, plan)
    derived = planner.recomputed(trace, plan.recompute)
    moves = summarise_moves(plan, derived)
    ended: dict[float, list[str]] = {}
    for transfer in replayed.transfers:
        ended.setdefault(transfer.end_seconds, []).append(f"{transfer.link} {trace.blocks[transfer.block].name}")
    for update in replayed.updates:
        ended.setdefault(update.end_seconds, []).append(f"update of subgroup {update.subgroup} on the host")
    return TimelineRows(
        seconds=replayed.iteration_seconds,
        budget_bytes=plan.budgets.device_bytes,
        links=tuple(link.name for link in trace.hardware.links),
        stages=tuple(
            StageRow(
                name=stage.name,
                phase=stage.phase,
                reached=times.reached_seconds,
                start=times.start_seconds,
                end=times.end_seconds,
                waits_for="; ".join(ended.get(times.start_seconds, ())) if times.stall_seconds > 0 else "",
            )
            for stage, times in zip(derived.stages, replayed.stages, strict=True)
        ),
        copies=tuple(_copy(transfer, moves[transfer.move], trace) for transfer in replayed.transfers),
        updates=tuple(
            UpdateRow(
                subgroup=update.subgroup,
                name=trace.stages[trace.subgroups[update.subgroup].stage].name,
                start=update.start_seconds,
                end=update.end_seconds,
            )
            for update in replayed.updates
        ),
        memory=_memory(replayed),
        unplanned=_memory(planner.simulate(trace, _nothing_moves(trace))),
    )


def _nothing_moves(trace: Trace) -> Plan:
    budgets = Budgets(device_bytes=max(live_bytes(trace)))
    return Plan(trace_fingerprint=trace.fingerprint, policy="nothing moves", budgets=budgets)


def _copy(transfer: Transfer, move: MoveSummary, trace: Trace) -> CopyRow:
    block = trace.blocks[transfer.block]
    return CopyRow(
        link=transfer.link,
        block=transfer.block,
        name=block.name,
        kind=block.kind,
        size_bytes=block.size_bytes,
        queued=transfer.queued_seconds,
        start=transfer.start_seconds,
        end=transfer.end_seconds,
        why=_why(move),
    )


def _why(move: MoveSummary) -> str:
    """Say between which uses the block is away, and which stage needs its room."""
    away = f"away after {move.after_name}, until {move.before_name}"
    if move.host_update is not None:
        return f"{away}; subgroup {move.host_update} is updated on the host"
    if move.relieved_name is None or move.excess_bytes is None:
        return f"{away}; no stage would exceed the budget otherwise"
    return f"{away}; if nothing left, {move.relieved_name} would exceed the budget by {format_bytes(move.excess_bytes)}"


def _memory(timeline: Timeline) -> MemoryRows:
    present = {kind for _, kind, _ in timeline.memory}
    kinds = [kind for kind in _KINDS if kind in present]
    return MemoryRows(kinds=tuple(kinds), seconds=timeline.iteration_seconds, points=tuple(_points(timeline.memory, kinds)))


def _points(changes: Sequence[MemoryChange], kinds: Sequence[str]) -> Iterable[tuple[float, ...]]:
    """Yield the bytes of each kind after all changes of an instant."""
    held: dict[str, int] = dict.fromkeys(kinds, 0)
    for number, (seconds, kind, size) in enumerate(changes):
        held[kind] += size
        if number + 1 == len(changes) or changes[number + 1][0] > seconds:
            values: Any = (seconds, *held.values())
            yield values
