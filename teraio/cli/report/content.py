"""All that a report tells, as data: the page shows exactly this, and `--json` prints it."""

from __future__ import annotations

import planner
from planner.schema import Budgets, FrozenModel, Plan, Predicted, Trace
from teraio.cli.comparison import Comparison, Sweep
from teraio.cli.plan_summary import summarise_plan
from teraio.cli.replay_summary import LinkSummary, StallSummary
from teraio.cli.report.measured import MeasuredRun
from teraio.cli.report.timeline import TimelineRows, timeline_rows
from teraio.cli.trace_summary import BlockSummary, idlest_blocks, summarise_trace

__all__ = ["Report", "TraceFacts", "report_of"]

_ROWS = 12
"""Stalls and idle blocks of which a report has the first ones."""


class IdleBlock(FrozenModel):
    """A block and how long it is idle in an iteration that never waits.

    `moves`: how often the plan lets it leave. `remade`: whether the plan makes it anew by a re-run.
    """

    block: int
    name: str
    kind: str
    size_bytes: int
    longest_idle_seconds: float
    idle_seconds: float
    moves: int
    remade: bool


class TraceFacts(FrozenModel):
    """What a report knows only with the trace. `critical`: seconds on the critical path by resource.

    `stalls`, `idle`: the longest, and how many there are in all.
    """

    name: str
    created_by: str
    hardware: str
    peak_bytes: int
    floor_bytes: int
    links: tuple[LinkSummary, ...]
    critical: dict[str, float]
    stalls: tuple[StallSummary, ...]
    stall_count: int
    idle: tuple[IdleBlock, ...]
    idle_count: int
    timeline: TimelineRows


class Report(FrozenModel):
    """A plan, shown. Everything but `measured` is a prediction."""

    policy: str
    trace_fingerprint: str
    budgets: Budgets
    predicted: Predicted | None
    moves: int
    blocks_moved: int
    host_updates: int
    reruns: int
    facts: TraceFacts | None = None
    sweep: Sweep | None = None
    comparison: Comparison | None = None
    measured: MeasuredRun | None = None


def report_of(
    plan: Plan,
    trace: Trace | None,
    *,
    sweep: Sweep | None = None,
    comparison: Comparison | None = None,
    measured: MeasuredRun | None = None,
) -> Report:
    """Return the report of a plan. Raises PlanError if the plan does not belong to the trace, InfeasiblePlanError if it cannot
    be carried out."""
    return Report(
        policy=plan.policy,
        trace_fingerprint=plan.trace_fingerprint,
        budgets=plan.budgets,
        predicted=plan.predicted,
        moves=len(plan.moves),
        blocks_moved=len({move.block for move in plan.moves}),
        host_updates=sum(update.where == "host" for update in plan.updates),
        reruns=len(plan.recompute),
        facts=None if trace is None else _facts(plan, trace),
        sweep=sweep,
        comparison=comparison,
        measured=measured,
    )


def _facts(plan: Plan, trace: planner.Trace) -> TraceFacts:
    summary, traced = summarise_plan(plan, trace), summarise_trace(trace)
    assert summary.stalls is not None and summary.links is not None and summary.critical is not None  # the trace is given
    idle = idlest_blocks(traced.blocks)
    leaves: dict[int, int] = {}
    for move in plan.moves:
        leaves[move.block] = leaves.get(move.block, 0) + 1
    remade = {block for each in plan.recompute for block in trace.recompute[each.group].blocks}
    return TraceFacts(
        name=trace.name,
        created_by=trace.created_by,
        hardware=trace.hardware.name,
        peak_bytes=traced.peak_bytes,
        floor_bytes=traced.floor_bytes,
        links=summary.links,
        critical=summary.critical.seconds,
        stalls=summary.stalls[:_ROWS],
        stall_count=len(summary.stalls),
        idle=tuple(_idle(block, leaves.get(block.id, 0), remade=block.id in remade) for block in idle[:_ROWS]),
        idle_count=len(idle),
        timeline=timeline_rows(plan, trace),
    )


def _idle(block: BlockSummary, moves: int, *, remade: bool) -> IdleBlock:
    return IdleBlock(
        block=block.id,
        name=block.name,
        kind=block.kind,
        size_bytes=block.size_bytes,
        longest_idle_seconds=block.longest_idle_seconds,
        idle_seconds=block.idle_seconds,
        moves=moves,
        remade=remade,
    )
