"""The summaries of plans and replays as tables: moves, stalls and the critical path."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.schema import Predicted
from planner.simulator import STAGES
from teraio.cli.plan_summary import MoveSummary, PlanSummary
from teraio.cli.recompute_summary import RerunSummary
from teraio.cli.replay_summary import CriticalSummary, LinkSummary, ProcessorSummary, ReplaySummary, StallSummary
from teraio.cli.tables import (
    Page,
    exact_bytes,
    facts,
    format_bytes,
    format_seconds,
    limit_bytes,
    named,
    plain,
    section,
    share,
    table_of,
)

__all__ = ["plan_tables", "replay_tables"]


def plan_tables(plan: PlanSummary, rows: int) -> Page:
    """Return a plan: overview, prediction and `rows` of its moves; with links, stalls and critical path if it was replayed."""
    solver = plan.solver
    ended = solver.status if solver.gap is None else f"{solver.status}, gap {solver.gap:.2%}"
    iteration = sum(plan.critical.seconds.values()) if plan.critical else 0.0
    overview = facts(
        ("plan for", plan.trace_name or plan.trace_fingerprint),
        ("policy", plan.policy),
        ("solver", f"{solver.name}: {ended}, {format_seconds(solver.solve_seconds)}"),
        ("device budget", exact_bytes(plan.budgets.device_bytes)),
        ("host budget", limit_bytes(plan.budgets.host_bytes)),
        ("storage budget", limit_bytes(plan.budgets.storage_bytes)),
        ("moves", f"{len(plan.moves)} of {plan.blocks_moved} blocks, {plan.dropped} without a copy out"),
        ("recomputed", _recomputed(plan)),
        ("updates on the host", _updates(plan)),
        ("host's processor", _processor(plan.host_processor, iteration)),
        ("drives last", _lifetime(plan.drive_lifetime_seconds)),
        ("critical path", _shares(plan.critical)),
    )
    predicted = () if plan.predicted is None else (_prediction(plan.predicted),)
    moves = (section("moves", _moves(plan.moves[:rows]), len(plan.moves)),) if plan.moves else ()
    reruns = (section("recomputed", _reruns(plan.reruns[:rows]), len(plan.reruns)),) if plan.reruns else ()
    links = (_links(plan.links, iteration),) if plan.links else ()
    stalls = (_stalls(plan.stalls, rows),) if plan.stalls is not None else ()
    return (overview, *predicted, *moves, *reruns, *links, *stalls, *_awaited(plan.critical, rows))


def replay_tables(replay: ReplaySummary, rows: int) -> Page:
    """Return a replay: overview, links, and `rows` each of the longest stalls and of the copies on the critical path."""
    waited = share(replay.stall_seconds, replay.iteration_seconds)
    said = "not given" if replay.planned_seconds is None else format_seconds(replay.planned_seconds)
    peaks = [(f"peak of {tier}", exact_bytes(size)) for tier, size in replay.peak_bytes.items() if size]
    overview = facts(
        ("iteration", format_seconds(replay.iteration_seconds)),
        ("in the plan's file", said),
        ("without waiting", format_seconds(replay.ideal_seconds)),
        ("recomputation", format_seconds(replay.recompute_seconds) if replay.recompute_seconds else ""),
        ("stall", f"{format_seconds(replay.stall_seconds)}, {waited}"),
        ("device budget", exact_bytes(replay.device_budget_bytes)),
        *peaks,
        ("host's processor", _processor(replay.host_processor, replay.iteration_seconds)),
        ("written to storage", exact_bytes(replay.storage_written_bytes)),
        ("critical path", _shares(replay.critical)),
    )
    links = _links(replay.links, replay.iteration_seconds)
    return overview, links, _stalls(replay.stalls, rows), *_awaited(replay.critical, rows)


def _prediction(predicted: Predicted) -> Group:
    stall = share(predicted.stall_seconds, predicted.iteration_seconds)
    table = facts(
        ("iteration", format_seconds(predicted.iteration_seconds)),
        ("without waiting", format_seconds(predicted.ideal_seconds)),
        ("recomputation", format_seconds(predicted.recompute_seconds) if predicted.recompute_seconds else ""),
        ("no plan is faster than", format_seconds(predicted.lower_bound_seconds)),
        ("stall", f"{format_seconds(predicted.stall_seconds)}, {stall}"),
        *((f"peak of {tier}", exact_bytes(size)) for tier, size in predicted.peak_bytes.items() if size),
        *((f"moved {link}", exact_bytes(size)) for link, size in predicted.moved_bytes.items()),
    )
    return Group(Text("predicted, per iteration", style="bold"), table)


def _recomputed(plan: PlanSummary) -> str:
    """Return how many stages run again, how long that takes, and how long copying instead would take."""
    if not plan.reruns:
        return ""
    stages = f"{len(plan.reruns)} forward stages"
    if any(each.seconds is None for each in plan.reruns):
        return stages
    size, seconds = sum(each.size_bytes or 0 for each in plan.reruns), sum(each.seconds or 0.0 for each in plan.reruns)
    copies = sum(each.copy_seconds or 0.0 for each in plan.reruns)
    saved = f" in place of {format_seconds(copies)} of copies" if copies else ""
    return f"{stages}, {format_bytes(size)}: {format_seconds(seconds)}{saved}"


def _reruns(reruns: Sequence[RerunSummary]) -> Table:
    """The last two columns tell why a stage runs again: what it takes, and what copying its blocks out and in would take."""
    table = table_of(">group", "stage", "runs again before", ">makes", ">in", ">copies would take")
    for each in reruns:
        table.add_row(
            str(each.group),
            "" if each.stage is None else named(each.stage, each.stage_name),
            named(each.at, each.at_name),
            "" if each.size_bytes is None else format_bytes(each.size_bytes),
            "" if each.seconds is None else format_seconds(each.seconds),
            "" if each.copy_seconds is None else format_seconds(each.copy_seconds),
        )
    return table


def _moves(moves: Sequence[MoveSummary]) -> Table:
    """The last two columns tell why a block moves. They need the trace and are left out without it."""
    reasons = any(move.size_bytes is not None for move in moves)
    why = (">over budget if nothing leaves", "in") if reasons else ()
    table = table_of("block", ">size", "tier", "after", "before", ">copy out", ">copy in", *why)
    for move in moves:
        reason = (_reason(move), named(move.relieved_stage, move.relieved_name)) if reasons else ()
        table.add_row(
            named(move.block, move.block_name),
            "" if move.size_bytes is None else format_bytes(move.size_bytes),
            move.tier,
            named(move.after, move.after_name),
            named(move.before, move.before_name),
            "dropped" if move.offload_start is None else str(move.offload_start),
            "does not come back" if move.prefetch_start is None else str(move.prefetch_start),
            *reason,
        )
    return table


def _reason(move: MoveSummary) -> str:
    if move.excess_bytes is not None:
        return format_bytes(move.excess_bytes)
    return "no stage" if move.host_update is None else "for its update"


def _links(links: Sequence[LinkSummary], iteration_seconds: float) -> Table:
    table = table_of("link", ">copies", ">size", ">busy", ">of the iteration")
    for link in links:
        busy = format_seconds(link.busy_seconds), share(link.busy_seconds, iteration_seconds)
        table.add_row(link.link, str(link.transfers), format_bytes(link.size_bytes), *busy)
    return table


def _stalls(stalls: tuple[StallSummary, ...], rows: int) -> RenderableType:
    if not stalls:
        return Text("no stage waits")
    table = table_of(">stage", "name", ">waits")
    for stall in stalls[:rows]:
        table.add_row(str(stall.stage), plain(stall.name), format_seconds(stall.stall_seconds))
    return section("stages that wait", table, len(stalls))


def _updates(plan: PlanSummary) -> str:
    if plan.subgroups is None:
        return str(len(plan.host_updates)) if plan.host_updates else ""
    return f"{len(plan.host_updates)} of {plan.subgroups} subgroups" if plan.subgroups else ""


def _processor(processor: ProcessorSummary | None, iteration_seconds: float) -> str:
    if processor is None or not processor.updates:
        return ""
    busy = f"{format_seconds(processor.busy_seconds)}, {share(processor.busy_seconds, iteration_seconds)}"
    return f"{processor.updates} update{'s' if processor.updates > 1 else ''}, busy {busy}"


def _shares(critical: CriticalSummary | None) -> str:
    if critical is None:
        return ""
    whole = sum(critical.seconds.values())
    return ", ".join(f"{resource} {share(seconds, whole)}" for resource, seconds in critical.seconds.items())


def _awaited(critical: CriticalSummary | None, rows: int) -> Page:
    """Return the copies and updates on the critical path. The iteration gets shorter only if these, or stages on it, do."""
    pieces = [] if critical is None else [piece for piece in critical.pieces if piece.resource != STAGES]
    if not pieces:
        return ()
    pieces.sort(key=lambda piece: piece.start_seconds - piece.end_seconds)
    table = table_of("on", "what", ">begins", ">takes")
    for piece in pieces[:rows]:
        times = format_seconds(piece.start_seconds), format_seconds(piece.end_seconds - piece.start_seconds)
        table.add_row(piece.resource, plain(piece.name), *times)
    return (section("on the critical path beside the stages", table, len(pieces)),)


def _lifetime(seconds: float | None) -> str:
    if seconds is None:
        return ""
    days = seconds / 86400
    length = f"{days:,.1f} days" if days < 1000 else f"{days / 365.25:,.1f} years"
    return f"{length} of training without a break"
