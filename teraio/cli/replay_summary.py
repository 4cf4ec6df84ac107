"""The result of `teraio simulate`: the replay of a plan in numbers, also as JSON."""

from __future__ import annotations

from collections.abc import Sequence

import planner
from planner.problem import recompute_seconds
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
    """One link in one iteration of the steady state. `busy_seconds`: time during which it copied."""

    link: str
    transfers: int
    size_bytes: int
    busy_seconds: float


class ProcessorSummary(FrozenModel):
    """The host's processor in one iteration of the steady state. `busy_seconds`: time during which it updated subgroups."""

    updates: int
    busy_seconds: float


class SegmentSummary(FrozenModel):
    """One segment of the critical path. Times are seconds from the start of the iteration.

    `resource`: `"stages"`, `"host updates"` or the name of a link. `index`: number of the stage, the subgroup or the move.
    `name`: of the stage, of the subgroup's stage, or of the block that is copied.
    """

    resource: str
    index: int
    name: str
    start_seconds: float
    end_seconds: float


class CriticalSummary(FrozenModel):
    """The critical path: why the iteration takes as long as it does.

    `pieces`: its segments in order, without gaps between them. `seconds`: time on the path by resource, largest first; the sum is
    the iteration's time.
    """

    seconds: dict[str, float]
    pieces: tuple[SegmentSummary, ...]


class ReplaySummary(FrozenModel):
    """The replay of a plan. `planned_seconds`: the iteration time in the plan's file. `stalls`: longest first.

    `ideal_seconds`: of the trace, with all updates on the device and without re-runs; these take `recompute_seconds`.
    An iteration with updates on the host can be shorter than that, and its stalls can add up to more than its excess over
    `ideal_seconds`.
    """

    iteration_seconds: float
    ideal_seconds: float
    recompute_seconds: float
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
    """Return the replay of `plan` on `trace` in numbers."""
    stages = planner.recomputed(trace, plan.recompute).stages
    return ReplaySummary(
        iteration_seconds=timeline.iteration_seconds,
        ideal_seconds=trace.ideal_seconds,
        recompute_seconds=recompute_seconds(trace, plan.recompute),
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
        stalls=_stalls(stages, timeline),
        critical=_critical(trace, stages, critical_path(trace, plan, timeline)),
    )


def _stalls(stages: Sequence[planner.Stage], timeline: planner.Timeline) -> tuple[StallSummary, ...]:
    stalls = [
        StallSummary(stage=stage.id, name=stage.name, stall_seconds=times.stall_seconds)
        for stage, times in zip(stages, timeline.stages, strict=True)
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


def _critical(trace: planner.Trace, stages: Sequence[planner.Stage], path: CriticalPath) -> CriticalSummary:
    return CriticalSummary(
        seconds=path.seconds(),
        pieces=tuple(
            SegmentSummary(
                resource=piece.resource,
                index=piece.index,
                name=_segment_name(trace, stages, piece),
                start_seconds=piece.start_seconds,
                end_seconds=piece.end_seconds,
            )
            for piece in path.segments
        ),
    )


def _segment_name(trace: planner.Trace, stages: Sequence[planner.Stage], piece: PathSegment) -> str:
    if piece.block is not None:
        return trace.blocks[piece.block].name
    if piece.resource == STAGES:
        return stages[piece.index].name
    return trace.stages[trace.subgroups[piece.index].stage].name
