"""Comparisons of policies and sweeps over budgets as tables."""

from __future__ import annotations

from planner.schema import Predicted
from teraio.cli.comparison import Comparison, Sweep
from teraio.cli.tables import Page, exact_bytes, facts, format_bytes, format_seconds, limit_bytes, plain, table_of

__all__ = ["comparison_tables", "sweep_tables"]


def comparison_tables(comparison: Comparison) -> Page:
    """Policies side by side, and the bound that none can beat."""
    bound = comparison.lower_bound_seconds
    overview = facts(
        ("trace", comparison.trace_name),
        ("device budget", exact_bytes(comparison.budgets.device_bytes)),
        ("host budget", limit_bytes(comparison.budgets.host_bytes)),
        ("storage budget", limit_bytes(comparison.budgets.storage_bytes)),
        ("without waiting", format_seconds(comparison.ideal_seconds)),
        ("no plan is faster than", "" if bound is None else format_seconds(bound)),
    )
    table = table_of("policy", ">iteration", ">over the bound", ">stall", ">recomputed", ">moved", ">written to storage", "note")
    for verdict in comparison.verdicts:
        if verdict.predicted is None or bound is None:
            table.add_row(verdict.policy, "", "", "", "", "", "", plain(verdict.error))
            continue
        over = f"{verdict.predicted.iteration_seconds / bound - 1:.1%}" if bound else ""
        table.add_row(verdict.policy, *_achieved(verdict.predicted, over), "")
    return overview, table


def sweep_tables(sweep: Sweep) -> Page:
    """Iteration time against device budget."""
    overview = facts(
        ("trace", sweep.trace_name),
        ("policy", sweep.policy),
        ("without waiting", format_seconds(sweep.ideal_seconds)),
        ("floor (smallest budget)", exact_bytes(sweep.floor_bytes)),
        ("peak if nothing moves", exact_bytes(sweep.peak_bytes)),
    )
    table = table_of(
        ">device budget", ">iteration", ">over the ideal", ">stall", ">recomputed", ">moved", ">written to storage", "note"
    )
    for point in sweep.points:
        size = format_bytes(point.device_bytes)
        if point.predicted is None:
            table.add_row(size, "", "", "", "", "", "", plain(point.error))
            continue
        over = f"{point.predicted.iteration_seconds / sweep.ideal_seconds - 1:.1%}" if sweep.ideal_seconds else ""
        smaller = point.planned_for_bytes is not None and point.planned_for_bytes < point.device_bytes
        note = f"the plan for {format_bytes(point.planned_for_bytes or 0)}" if smaller else ""
        table.add_row(size, *_achieved(point.predicted, over), note)
    return overview, table


def _achieved(predicted: Predicted, over: str) -> tuple[str, ...]:
    moved = sum(predicted.moved_bytes.values())
    return (
        format_seconds(predicted.iteration_seconds),
        over,
        format_seconds(predicted.stall_seconds),
        format_seconds(predicted.recompute_seconds),
        format_bytes(moved),
        format_bytes(predicted.storage_written_bytes),
    )
