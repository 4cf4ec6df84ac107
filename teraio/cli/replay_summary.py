"""What `teraio simulate` tells: the replay of a plan in numbers. Also its JSON."""

from __future__ import annotations

import planner
from planner.schema import FrozenModel
from planner.simulator import STAGES, CriticalPath, PathSegment, critical_path

__all__ = ["CriticalSummary", "LinkSummary", "ProcessorSummary", "ReplaySummary", "StallSummary", "summarise_replay"]

_ROUNDING_SECONDS = 1e-9


class StallSummary(FrozenModel):
    """A stage that waits for its inputs, or for room."""

    stage: int
    name: str
    stall_seconds: float


class LinkSummary(FrozenModel):
    """One link in one iteration of the steady state. `busy_seconds`: how long it copied."""

    link: str
    transfers: int
    size_bytes: int
    busy_seconds: float


class ProcessorSummary(FrozenModel):
    """The host's processor in one iteration of the steady state. `busy_seconds`: how long it updated subgroups."""

    updates: int
    busy_seconds: float


class PieceSummary(FrozenModel):
    """One piece of the critical path, in seconds from the iteration's begin.

    `resource`: `"stages"`, `"host updates"` or a link; `index`: of the stage, the subgroup or the move; `name`: of the
    stage, the subgroup's stage or the block that is copied.
    """

    resource: str
    index: int
    name: str
    start_seconds: float
    end_seconds: float


class CriticalSummary(FrozenModel):
    """Why the iteration takes as long as it does: pieces that follow one another without a gap, in order.

    `seconds`: how much of them each resource takes, largest first; in all, the iteration's time.
    """

    seconds: dict[str, float]
    pieces: tuple[PieceSummary, ...]


class ReplaySummary(FrozenModel):
    """What the simulator says of a plan. `planned_seconds`: what its file says. `stalls`: longest first.

    `ideal_seconds` is that of the trace, all updates on the device: with updates on the host, an iteration can be
    shorter, and its stalls can be more than what it exceeds the ideal by.
    """

    iteration_seconds: float
    ideal_seconds: float
    stall_seconds: float
    planned_seconds: float | None
    device_budget_bytes: int
    peak_bytes: dict[str, int]
    moved_bytes: dict[str, int]
    storage_written_bytes: int
    links: tuple[LinkSummary, ...]
    host_processor: ProcessorSummary
    stalls: tuple[StallSummary, ...]
    critical: CriticalSummary


def summarise_replay(trace: planner.Trace, plan: planner.Plan, timeline: planner.Timeline) -> ReplaySummary:
    """The replay of `plan` on `trace` in numbers."""
    return ReplaySummary(
        iteration_seconds=timeline.iteration_seconds,
        ideal_seconds=trace.ideal_seconds,
        stall_seconds=timeline.stall_seconds,
        planned_seconds=None if plan.predicted is None else plan.predicted.iteration_seconds,
        device_budget_bytes=plan.budgets.device_bytes,
        peak_bytes=timeline.peak_bytes,
        moved_bytes=timeline.moved_bytes,
        storage_written_bytes=timeline.storage_written_bytes,
        links=tuple(_link(link.name, timeline) for link in trace.hardware.links),
        host_processor=ProcessorSummary(
            updates=len(timeline.updates),
            busy_seconds=sum(update.end_seconds - update.start_seconds for update in timeline.updates),
        ),
        stalls=_stalls(trace, timeline),
        critical=_critical(trace, critical_path(trace, plan, timeline)),
    )


def _stalls(trace: planner.Trace, timeline: planner.Timeline) -> tuple[StallSummary, ...]:
    stalls = [
        StallSummary(stage=stage.id, name=stage.name, stall_seconds=times.stall_seconds)
        for stage, times in zip(trace.stages, timeline.stages, strict=True)
        if times.stall_seconds > _ROUNDING_SECONDS
    ]
    return tuple(sorted(stalls, key=lambda stall: -stall.stall_seconds))


def _link(name: str, timeline: planner.Timeline) -> LinkSummary:
    transfers = [transfer for transfer in timeline.transfers if transfer.link == name]
    return LinkSummary(
        link=name,
        transfers=len(transfers),
        size_bytes=timeline.moved_bytes.get(name, 0),
        busy_seconds=sum(transfer.end_seconds - transfer.start_seconds for transfer in transfers),
    )


def _critical(trace: planner.Trace, path: CriticalPath) -> CriticalSummary:
    return CriticalSummary(
        seconds=path.seconds(),
        pieces=tuple(
            PieceSummary(
                resource=piece.resource,
                index=piece.index,
                name=_piece_name(trace, piece),
                start_seconds=piece.start_seconds,
                end_seconds=piece.end_seconds,
            )
            for piece in path.segments
        ),
    )


def _piece_name(trace: planner.Trace, piece: PathSegment) -> str:
    if piece.block is not None:
        return trace.blocks[piece.block].name
    stage = piece.index if piece.resource == STAGES else trace.subgroups[piece.index].stage
    return trace.stages[stage].name
