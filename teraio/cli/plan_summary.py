"""The result of `teraio plan` and `teraio inspect PLAN`: a plan in numbers and why its blocks move, also as JSON."""

from __future__ import annotations

from collections.abc import Sequence

import planner
from planner.problem import live_bytes
from planner.schema import FrozenModel, Predicted, SolverReport
from teraio.cli.recompute_summary import RerunSummary, summarise_reruns
from teraio.cli.replay_summary import CriticalSummary, LinkSummary, ProcessorSummary, StallSummary, summarise_replay

__all__ = ["HostUpdateSummary", "MoveSummary", "PlanSummary", "summarise_moves", "summarise_plan"]


class MoveSummary(FrozenModel):
    """One move of the plan. Names, size and reason are None without the trace.

    `offload_start` is None if the block has a valid copy and is only dropped. `prefetch_start` is None if the block does not come
    back: an update on the host consumes it, or nothing uses it before it dies.
    The reason: suppose that no block ever left. Of the stages that run while this block is away, `relieved_stage` would exceed
    the device budget the most, by `excess_bytes`. Both are None if no such stage would exceed it.
    `host_update`: the subgroup whose update on the host needs the block there; such a move needs no other reason.
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
    prefetch_start: int | None
    relieved_stage: int | None
    relieved_name: str | None
    excess_bytes: int | None
    host_update: int | None


class HostUpdateSummary(FrozenModel):
    """An optimizer subgroup that is updated on the host. All fields but `subgroup` are None without the trace.

    `stage`: the stage that would update it on the device. `seconds`: duration of the update on the host's processor.
    """

    subgroup: int
    stage: int | None
    stage_name: str | None
    elements: int | None
    seconds: float | None


class PlanSummary(FrozenModel):
    """A plan. Stages are numbered as in `planner.recomputed`: a stage that runs again counts as one more.

    `moves`: by size, largest first; in the plan's order without the trace.

    `dropped`: number of moves without a copy out. `subgroups`: how many the trace has. `host_updates`: those that are updated on
    the host, in that order. `stalls`: longest first. `stalls`, `links`, `host_processor` and `critical` come from a replay; they
    and `subgroups` are None without the trace.
    `drive_lifetime_seconds`: training time without a break until the rated bytes of the drives (TBW) are written; None if that
    was not asked for, or if nothing is written.
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
    subgroups: int | None
    host_updates: tuple[HostUpdateSummary, ...]
    reruns: tuple[RerunSummary, ...] = ()
    stalls: tuple[StallSummary, ...] | None = None
    links: tuple[LinkSummary, ...] | None = None
    host_processor: ProcessorSummary | None = None
    critical: CriticalSummary | None = None
    drive_lifetime_seconds: float | None = None


def summarise_plan(plan: planner.Plan, trace: planner.Trace | None = None, *, rated_bytes: int | None = None) -> PlanSummary:
    """Return the plan in numbers; with names, sizes and stalls if `trace` is given.

    rated_bytes: bytes that may be written to the drives in their life (TBW). Raises PlanError if the plan does not belong to the
    trace, InfeasiblePlanError if it cannot be carried out.
    """
    replay = derived = None
    if trace is not None:
        _check_belongs(plan, trace)
        replay = summarise_replay(trace, plan, planner.simulate(trace, plan))
        derived = planner.recomputed(trace, plan.recompute)
    moves = summarise_moves(plan, derived)
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
        subgroups=None if trace is None else len(trace.subgroups),
        host_updates=tuple(_host_update(update.subgroup, derived) for update in plan.updates if update.where == "host"),
        reruns=summarise_reruns(plan, trace),
        stalls=None if replay is None else replay.stalls,
        links=None if replay is None else replay.links,
        host_processor=None if replay is None else replay.host_processor,
        critical=None if replay is None else replay.critical,
        drive_lifetime_seconds=_drive_lifetime(plan.predicted, rated_bytes),
    )


def _check_belongs(plan: planner.Plan, trace: planner.Trace) -> None:
    """Raise PlanError if the plan was made for another trace or moves blocks that the trace lacks."""
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


def summarise_moves(plan: planner.Plan, trace: planner.Trace | None) -> list[MoveSummary]:
    """Return the moves in the order of the plan. trace: with the plan's re-runs (`planner.recomputed`), for names and reasons."""
    excess = () if trace is None else [size - plan.budgets.device_bytes for size in live_bytes(trace)]
    updated = {block: subgroup for subgroup in _on_host(plan, trace) for block in subgroup.blocks}
    return [_move(move, trace, excess, updated.get(move.block)) for move in plan.moves]


def _on_host(plan: planner.Plan, trace: planner.Trace | None) -> list[planner.Subgroup]:
    if trace is None:
        return []
    return [trace.subgroups[update.subgroup] for update in plan.updates if update.where == "host"]


def _move(
    move: planner.Move, trace: planner.Trace | None, excess: Sequence[int], updated: planner.Subgroup | None
) -> MoveSummary:
    """excess: for each stage the bytes beyond the device budget if no block ever left; empty without the trace.

    updated: the subgroup of the block, if it is updated on the host.
    """
    block = None if trace is None else trace.blocks[move.block]
    relieved = None if trace is None else _relieved(move, excess, consumed=updated is not None)
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
        prefetch_start=None if move.prefetch is None else move.prefetch.start,
        relieved_stage=relieved,
        relieved_name=None if relieved is None else _stage_name(relieved, trace),
        excess_bytes=None if relieved is None else excess[relieved],
        host_update=None if updated is None or not _serves(move, updated.stage, len(excess)) else updated.id,
    )


def _relieved(move: planner.Move, excess: Sequence[int], *, consumed: bool) -> int | None:
    """Return the stage that exceeds the budget the most among those that the block is away in; None if none exceeds it.

    consumed: whether an update on the host consumes the block, if it does not come back.
    """
    leaves = move.after if move.offload is None else move.offload.start
    back = move.before + consumed if move.prefetch is None else move.prefetch.start
    away = (stage % len(excess) for stage in range(leaves + 1, back))
    worst = max(away, key=excess.__getitem__, default=None)
    return worst if worst is not None and excess[worst] > 0 else None


def _serves(move: planner.Move, stage: int, stages: int) -> bool:
    """Return whether the block is away for its update on the host, which `stage` would do on the device.

    See [Note: updates on the host] in `planner.problem.host_updates`.
    """
    return move.prefetch is None or any(move.after < update < move.before for update in (stage, stage + stages))


def _host_update(number: int, trace: planner.Trace | None) -> HostUpdateSummary:
    subgroup = None if trace is None else trace.subgroups[number]
    return HostUpdateSummary(
        subgroup=number,
        stage=None if subgroup is None else subgroup.stage,
        stage_name=None if subgroup is None else _stage_name(subgroup.stage, trace),
        elements=None if subgroup is None else subgroup.elements,
        seconds=None if subgroup is None else subgroup.host_seconds,
    )


def _stage_name(stage: int, trace: planner.Trace | None) -> str | None:
    if trace is None:
        return None
    iteration, position = divmod(stage, len(trace.stages))
    return trace.stages[position].name + (" (next iteration)" if iteration else "")


def _drive_lifetime(predicted: Predicted | None, rated_bytes: int | None) -> float | None:
    if predicted is None or rated_bytes is None or not predicted.storage_written_bytes:
        return None
    return rated_bytes / predicted.storage_written_bytes * predicted.iteration_seconds
