"""What `teraio inspect` and `teraio simulate` tell: traces, plans and replays in numbers. Also their JSON."""

from __future__ import annotations

from collections.abc import Iterable

import planner
from planner.files import FrozenModel
from planner.lifetimes import live_bytes
from planner.plan import Predicted, SolverReport
from planner.trace import BlockKind, Phase

__all__ = [
    "PlanSummary",
    "ReplaySummary",
    "TraceSummary",
    "summarise_plan",
    "summarise_replay",
    "summarise_trace",
]

_ROUNDING_SECONDS = 1e-9


class PhaseSummary(FrozenModel):
    """All stages of one phase."""

    phase: Phase
    stages: int
    duration_seconds: float


class KindSummary(FrozenModel):
    """All blocks of one kind. `movable_bytes`: of those that may leave the device."""

    kind: BlockKind
    blocks: int
    size_bytes: int
    movable_bytes: int


class StageSummary(FrozenModel):
    """One stage. `live_bytes`: on the device while it runs if nothing ever leaves, workspace included."""

    id: int
    name: str
    phase: Phase
    duration_seconds: float
    workspace_bytes: int
    live_bytes: int


class TraceSummary(FrozenModel):
    """A trace. `floor_bytes`, `floor_stage`: the smallest device budget that works, and what sets it.

    `peak_bytes`, `peak_stage`: the same if nothing ever leaves the device. `blocks`: largest first.
    """

    name: str
    created_by: str
    fingerprint: str
    hardware: planner.Hardware
    ideal_seconds: float
    peak_bytes: int
    peak_stage: str
    floor_bytes: int
    floor_stage: str
    phases: tuple[PhaseSummary, ...]
    kinds: tuple[KindSummary, ...]
    stages: tuple[StageSummary, ...]
    blocks: tuple[planner.Block, ...]


class MoveSummary(FrozenModel):
    """One move of the plan; names and size are None where the trace is not at hand.

    `offload_start` is None where a valid copy waits already and the block is only dropped.
    """

    block: int
    block_name: str | None
    size_bytes: int | None
    tier: str
    after: int
    after_name: str | None
    before: int
    before_name: str | None
    offload_start: int | None
    prefetch_start: int


class StallSummary(FrozenModel):
    """A stage that waits for its inputs, or for room."""

    stage: int
    name: str
    stall_seconds: float


class PlanSummary(FrozenModel):
    """A plan. `moves` are in the plan's order, or by size, largest first, where the trace is at hand.

    `dropped`: moves without a copy out. `stalls`: longest first, None where the trace is not at hand.
    `drive_lifetime_seconds`: of training without a break until the drives' rated bytes (TBW) are written; None
    where that is not asked for, or nothing is written.
    """

    policy: str
    trace_fingerprint: str
    trace_name: str | None
    budgets: planner.Budgets
    solver: SolverReport
    predicted: Predicted | None
    blocks_moved: int
    dropped: int
    moves: tuple[MoveSummary, ...]
    stalls: tuple[StallSummary, ...] | None = None
    drive_lifetime_seconds: float | None = None


class LinkSummary(FrozenModel):
    """One link in one iteration of the steady state. `busy_seconds`: how long it copied."""

    link: str
    transfers: int
    size_bytes: int
    busy_seconds: float


class ReplaySummary(FrozenModel):
    """What the simulator says of a plan. `planned_seconds`: what its file says. `stalls`: longest first."""

    iteration_seconds: float
    ideal_seconds: float
    stall_seconds: float
    planned_seconds: float | None
    device_budget_bytes: int
    peak_bytes: dict[str, int]
    moved_bytes: dict[str, int]
    storage_written_bytes: int
    links: tuple[LinkSummary, ...]
    stalls: tuple[StallSummary, ...]


def summarise_trace(trace: planner.Trace) -> TraceSummary:
    """The trace in numbers."""
    live = live_bytes(trace)
    peak_stage = max(range(len(live)), key=live.__getitem__)
    floor_bytes, floor_stage = planner.floor(trace) if _can_move(trace) else (live[peak_stage], peak_stage)
    blocks = sorted(trace.blocks, key=lambda block: (-block.size_bytes, block.id))
    return TraceSummary(
        name=trace.name,
        created_by=trace.created_by,
        fingerprint=trace.fingerprint,
        hardware=trace.hardware,
        ideal_seconds=trace.ideal_seconds,
        peak_bytes=live[peak_stage],
        peak_stage=trace.stages[peak_stage].name,
        floor_bytes=floor_bytes,
        floor_stage=trace.stages[floor_stage].name,
        phases=tuple(_phases(trace.stages)),
        kinds=tuple(_kinds(trace.blocks)),
        stages=tuple(StageSummary(**dict(stage), live_bytes=live[stage.id]) for stage in trace.stages),
        blocks=tuple(blocks),
    )


def summarise_plan(
    plan: planner.Plan, trace: planner.Trace | None = None, *, rated_bytes: int | None = None
) -> PlanSummary:
    """The plan in numbers; with names, sizes and stalls if `trace` is given.

    rated_bytes: what the drives may be written in all (TBW). Raises PlanError if the plan does not belong to the
    trace, InfeasiblePlanError if it cannot be carried out.
    """
    if trace is not None:
        _check_belongs(plan, trace)
    moves = [_move(move, trace) for move in plan.moves]
    return PlanSummary(
        policy=plan.policy,
        trace_fingerprint=plan.trace_fingerprint,
        trace_name=None if trace is None else trace.name,
        budgets=plan.budgets,
        solver=plan.solver,
        predicted=plan.predicted,
        blocks_moved=len({move.block for move in plan.moves}),
        dropped=sum(move.offload is None for move in plan.moves),
        moves=tuple(sorted(moves, key=lambda move: -(move.size_bytes or 0))),
        stalls=None if trace is None else _stalls(trace, planner.simulate(trace, plan)),
        drive_lifetime_seconds=_drive_lifetime(plan.predicted, rated_bytes),
    )


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
        stalls=_stalls(trace, timeline),
    )


def _stalls(trace: planner.Trace, timeline: planner.Timeline) -> tuple[StallSummary, ...]:
    stalls = [
        StallSummary(stage=stage.id, name=stage.name, stall_seconds=times.stall_seconds)
        for stage, times in zip(trace.stages, timeline.stages, strict=True)
        if times.stall_seconds > _ROUNDING_SECONDS
    ]
    return tuple(sorted(stalls, key=lambda stall: -stall.stall_seconds))


def _drive_lifetime(predicted: Predicted | None, rated_bytes: int | None) -> float | None:
    if predicted is None or rated_bytes is None or not predicted.storage_written_bytes:
        return None
    return rated_bytes / predicted.storage_written_bytes * predicted.iteration_seconds


def _can_move(trace: planner.Trace) -> bool:
    """Whether a lower tier has links both ways."""
    names = {link.name for link in trace.hardware.links}
    return any({f"device->{tier}", f"{tier}->device"} <= names for tier in ("host", "storage"))


def _phases(stages: Iterable[planner.Stage]) -> Iterable[PhaseSummary]:
    by_phase: dict[Phase, list[planner.Stage]] = {}
    for stage in stages:
        by_phase.setdefault(stage.phase, []).append(stage)
    for phase, members in by_phase.items():
        seconds = sum(stage.duration_seconds for stage in members)
        yield PhaseSummary(phase=phase, stages=len(members), duration_seconds=seconds)


def _kinds(blocks: Iterable[planner.Block]) -> Iterable[KindSummary]:
    by_kind: dict[BlockKind, list[planner.Block]] = {}
    for block in blocks:
        by_kind.setdefault(block.kind, []).append(block)
    for kind, members in by_kind.items():
        yield KindSummary(
            kind=kind,
            blocks=len(members),
            size_bytes=sum(block.size_bytes for block in members),
            movable_bytes=sum(block.size_bytes for block in members if block.movable),
        )


def _check_belongs(plan: planner.Plan, trace: planner.Trace) -> None:
    """Raises PlanError if the plan was made for another trace, or moves blocks that it lacks."""
    if plan.trace_fingerprint != trace.fingerprint:
        raise planner.PlanError(
            f"the plan was made for a trace with fingerprint {plan.trace_fingerprint}, that of the trace "
            f"{trace.name!r} is {trace.fingerprint}; make a plan from this trace: teraio plan"
        )
    for move in plan.moves:
        if move.block >= len(trace.blocks):
            raise planner.PlanError(
                f"the plan moves block {move.block}; the blocks of the trace {trace.name!r} are 0 to "
                f"{len(trace.blocks) - 1}; make a plan from this trace: teraio plan"
            )


def _move(move: planner.Move, trace: planner.Trace | None) -> MoveSummary:
    block = None if trace is None else trace.blocks[move.block]
    return MoveSummary(
        block=move.block,
        block_name=None if block is None else block.name,
        size_bytes=None if block is None else block.size_bytes,
        tier=move.tier,
        after=move.after,
        after_name=_stage_name(move.after, trace),
        before=move.before,
        before_name=_stage_name(move.before, trace),
        offload_start=None if move.offload is None else move.offload.start,
        prefetch_start=move.prefetch.start,
    )


def _stage_name(stage: int, trace: planner.Trace | None) -> str | None:
    if trace is None:
        return None
    iteration, position = divmod(stage, len(trace.stages))
    return trace.stages[position].name + (" (next iteration)" if iteration else "")


def _link(name: str, timeline: planner.Timeline) -> LinkSummary:
    transfers = [transfer for transfer in timeline.transfers if transfer.link == name]
    return LinkSummary(
        link=name,
        transfers=len(transfers),
        size_bytes=timeline.moved_bytes.get(name, 0),
        busy_seconds=sum(transfer.end_seconds - transfer.start_seconds for transfer in transfers),
    )
