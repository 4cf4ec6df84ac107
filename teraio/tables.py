"""Summaries as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.plan import Predicted
from teraio.comparison import Comparison, Sweep
from teraio.summary import MoveSummary, PlanSummary, ReplaySummary, StallSummary, TraceSummary

Page = tuple[RenderableType, ...]
"""Parts that are printed with an empty line between them."""

__all__ = [
    "Page",
    "comparison_tables",
    "format_bytes",
    "format_seconds",
    "plan_tables",
    "replay_tables",
    "show",
    "sweep_tables",
    "trace_tables",
]

_WIDE = 300


def format_bytes(size_bytes: float) -> str:
    """"1.50 GiB", "64.0 MiB", "10 B": three digits, so that columns can be compared at a glance."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= scale:
            return f"{_three_digits(size_bytes / scale)} {unit}"
    return f"{size_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """"1.50 s", "64.0 ms", "3.00 µs"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return "0 s" if seconds <= 0 else f"{seconds / 1e-9:.0f} ns"


def show(page: Page) -> None:
    """Print a page: as wide as the terminal, or as wide as needed where it is no terminal."""
    console = Console()
    if not console.is_terminal:
        console.width = _WIDE
    with console.capture() as capture:
        for position, part in enumerate(page):
            console.print(*([""] if position else []), part, sep="\n")
    lines = [line.rstrip() for line in capture.get().splitlines()]
    console.file.write("\n".join(lines) + "\n")


def trace_tables(trace: TraceSummary, rows: int) -> Page:
    """A trace: overview, phases, kinds of blocks, links, and the `rows` longest stages and largest blocks."""
    overview = _facts(
        ("trace", trace.name),
        ("made by", trace.created_by),
        ("fingerprint", trace.fingerprint),
        ("hardware", trace.hardware.name),
        ("iteration without waiting", format_seconds(trace.ideal_seconds)),
        ("peak if nothing moves", f"{_exact(trace.peak_bytes)}, in {trace.peak_stage}"),
        ("floor (smallest budget)", f"{_exact(trace.floor_bytes)}, set by {trace.floor_stage}"),
    )
    phases = _table("phase", ">stages", ">time")
    for phase in trace.phases:
        phases.add_row(phase.phase, str(phase.stages), format_seconds(phase.duration_seconds))
    kinds = _table("kind", ">blocks", ">size", ">may move")
    for kind in trace.kinds:
        size, movable = format_bytes(kind.size_bytes), format_bytes(kind.movable_bytes)
        kinds.add_row(kind.kind, str(kind.blocks), size, movable)
    links = _table("link", ">rate", ">latency")
    for link in trace.hardware.links:
        rate = f"{format_bytes(link.bytes_per_second)}/s"
        links.add_row(link.name, rate, format_seconds(link.latency_seconds))
    longest = sorted(trace.stages, key=lambda stage: -stage.duration_seconds)[:rows]
    stages = _table(">stage", "name", ">time", ">workspace", ">if nothing moves")
    for stage in longest:
        sizes = format_bytes(stage.workspace_bytes), format_bytes(stage.live_bytes)
        stages.add_row(str(stage.id), Text(stage.name), format_seconds(stage.duration_seconds), *sizes)
    blocks = _table(">block", "name", "kind", ">size", "used by stages")
    for block in trace.blocks[:rows]:
        uses = _some(block.uses)
        blocks.add_row(str(block.id), Text(block.name), block.kind, format_bytes(block.size_bytes), uses)
    return (
        overview,
        phases,
        kinds,
        links,
        _section("longest stages", stages, len(trace.stages)),
        _section("largest blocks", blocks, len(trace.blocks)),
    )


def plan_tables(plan: PlanSummary, rows: int) -> Page:
    """A plan: overview, prediction, and `rows` of its moves."""
    solver = plan.solver
    ended = solver.status if solver.gap is None else f"{solver.status}, gap {solver.gap:.2%}"
    overview = _facts(
        ("plan for", plan.trace_name or plan.trace_fingerprint),
        ("policy", plan.policy),
        ("solver", f"{solver.name}: {ended}, {format_seconds(solver.solve_seconds)}"),
        ("device budget", _exact(plan.budgets.device_bytes)),
        ("host budget", _limit(plan.budgets.host_bytes)),
        ("storage budget", _limit(plan.budgets.storage_bytes)),
        ("moves", f"{len(plan.moves)} of {plan.blocks_moved} blocks, {plan.dropped} without a copy out"),
        ("drives last", _lifetime(plan.drive_lifetime_seconds)),
    )
    predicted = () if plan.predicted is None else (_prediction(plan.predicted),)
    moves = (_section("moves", _moves(plan.moves[:rows]), len(plan.moves)),) if plan.moves else ()
    stalls = (_stalls(plan.stalls, rows),) if plan.stalls is not None else ()
    return (overview, *predicted, *moves, *stalls)


def replay_tables(replay: ReplaySummary, rows: int) -> Page:
    """A replay: overview, links, and the `rows` stages that wait longest."""
    waited = _share(replay.stall_seconds, replay.iteration_seconds)
    said = "not given" if replay.planned_seconds is None else format_seconds(replay.planned_seconds)
    peaks = [(f"peak of {tier}", _exact(size)) for tier, size in replay.peak_bytes.items() if size]
    overview = _facts(
        ("iteration", format_seconds(replay.iteration_seconds)),
        ("in the plan's file", said),
        ("without waiting", format_seconds(replay.ideal_seconds)),
        ("stall", f"{format_seconds(replay.stall_seconds)}, {waited}"),
        ("device budget", _exact(replay.device_budget_bytes)),
        *peaks,
        ("written to storage", _exact(replay.storage_written_bytes)),
    )
    links = _table("link", ">copies", ">size", ">busy", ">of the iteration")
    for link in replay.links:
        busy = format_seconds(link.busy_seconds), _share(link.busy_seconds, replay.iteration_seconds)
        links.add_row(link.link, str(link.transfers), format_bytes(link.size_bytes), *busy)
    return overview, links, _stalls(replay.stalls, rows)


def comparison_tables(comparison: Comparison) -> Page:
    """Policies side by side, and the bound that none can beat."""
    bound = comparison.lower_bound_seconds
    overview = _facts(
        ("trace", comparison.trace_name),
        ("device budget", _exact(comparison.budgets.device_bytes)),
        ("host budget", _limit(comparison.budgets.host_bytes)),
        ("storage budget", _limit(comparison.budgets.storage_bytes)),
        ("without waiting", format_seconds(comparison.ideal_seconds)),
        ("no plan is faster than", "" if bound is None else format_seconds(bound)),
    )
    table = _table("policy", ">iteration", ">over the bound", ">stall", ">moved", ">written to storage", "note")
    for verdict in comparison.verdicts:
        if verdict.predicted is None or bound is None:
            table.add_row(verdict.policy, "", "", "", "", "", Text(verdict.error))
            continue
        over = f"{verdict.predicted.iteration_seconds / bound - 1:.1%}" if bound else ""
        table.add_row(verdict.policy, *_achieved(verdict.predicted, over), "")
    return overview, table


def sweep_tables(sweep: Sweep) -> Page:
    """Iteration time against device budget."""
    overview = _facts(
        ("trace", sweep.trace_name),
        ("policy", sweep.policy),
        ("without waiting", format_seconds(sweep.ideal_seconds)),
        ("floor (smallest budget)", _exact(sweep.floor_bytes)),
        ("peak if nothing moves", _exact(sweep.peak_bytes)),
    )
    table = _table(">device budget", ">iteration", ">over the ideal", ">stall", ">moved", ">written to storage", "note")
    for point in sweep.points:
        size = format_bytes(point.device_bytes)
        if point.predicted is None:
            table.add_row(size, "", "", "", "", "", Text(point.error))
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
        format_bytes(moved),
        format_bytes(predicted.storage_written_bytes),
    )


def _prediction(predicted: Predicted) -> Group:
    stall = _share(predicted.stall_seconds, predicted.iteration_seconds)
    table = _facts(
        ("iteration", format_seconds(predicted.iteration_seconds)),
        ("without waiting", format_seconds(predicted.ideal_seconds)),
        ("no plan is faster than", format_seconds(predicted.lower_bound_seconds)),
        ("stall", f"{format_seconds(predicted.stall_seconds)}, {stall}"),
        *((f"peak of {tier}", _exact(size)) for tier, size in predicted.peak_bytes.items() if size),
        *((f"moved {link}", _exact(size)) for link, size in predicted.moved_bytes.items()),
    )
    return Group(Text("predicted, per iteration", style="bold"), table)


def _stalls(stalls: tuple[StallSummary, ...], rows: int) -> RenderableType:
    if not stalls:
        return Text("no stage waits")
    table = _table(">stage", "name", ">waits")
    for stall in stalls[:rows]:
        table.add_row(str(stall.stage), Text(stall.name), format_seconds(stall.stall_seconds))
    return _section("stages that wait", table, len(stalls))


def _lifetime(seconds: float | None) -> str:
    if seconds is None:
        return ""
    days = seconds / 86400
    length = f"{days:,.1f} days" if days < 1000 else f"{days / 365.25:,.1f} years"
    return f"{length} of training without a break"


def _moves(moves: Iterable[MoveSummary]) -> Table:
    table = _table("block", ">size", "tier", "after", "before", ">copy out", ">copy in")
    for move in moves:
        table.add_row(
            _named(move.block, move.block_name),
            "" if move.size_bytes is None else format_bytes(move.size_bytes),
            move.tier,
            _named(move.after, move.after_name),
            _named(move.before, move.before_name),
            "dropped" if move.offload_start is None else str(move.offload_start),
            str(move.prefetch_start),
        )
    return table


def _facts(*facts: tuple[str, str]) -> Table:
    """Names and values in two columns; what has no value is left out."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        if value:
            table.add_row(name, Text(value))
    return table


def _table(*columns: str) -> Table:
    """A leading ">" aligns to the right. Names are never cut: what is too wide is folded."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        right = name.startswith(">")
        justify: Literal["left", "right"] = "right" if right else "left"
        table.add_column(name.lstrip(">"), justify=justify, overflow="fold", no_wrap=right)
    return table


def _section(title: str, table: Table, of: int) -> Group:
    shown = table.row_count
    more = "" if shown == of else f": {shown} of {of} (--rows shows more)"
    return Group(Text(title + more, style="bold"), table)


def _named(number: int, name: str | None) -> Text:
    return Text(str(number) if name is None else f"{number} {name}")


def _exact(size_bytes: int) -> str:
    rounded = format_bytes(size_bytes)
    return rounded if size_bytes < 1024 else f"{rounded} ({size_bytes:,} bytes)"


def _limit(size_bytes: int | None) -> str:
    return "no limit" if size_bytes is None else _exact(size_bytes)


def _share(part: float, whole: float) -> str:
    return f"{part / whole if whole else 0.0:.1%}"


def _some(stages: tuple[int, ...], most: int = 6) -> str:
    listed = ", ".join(str(stage) for stage in stages[:most])
    return listed if len(stages) <= most else f"{listed}, … ({len(stages)})"


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
