"""The summary of a trace as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from planner.schema import Hardware
from teraio.cli.recompute_summary import RecomputeSummary
from teraio.cli.tables import Page, exact_bytes, facts, format_bytes, format_seconds, plain, section, table_of
from teraio.cli.trace_summary import BlockSummary, TraceSummary, UpdateSummary, idlest_blocks

__all__ = ["trace_tables"]

_LEVELS = "·▁▂▃▄▅▆▇█"
_COLUMNS = 60


def trace_tables(trace: TraceSummary, rows: int) -> Page:
    """Return a trace: overview, phases, kinds of blocks, optimizer subgroups, memory over time, links and their shared rates.

    Then `rows` each of the longest stages, of the largest blocks and of those with the longest inactive periods.
    """
    overview = facts(
        ("trace", trace.name),
        ("made by", trace.created_by),
        ("fingerprint", trace.fingerprint),
        ("hardware", trace.hardware.name),
        ("iteration without waiting", format_seconds(trace.ideal_seconds)),
        ("of that in collectives", format_seconds(trace.collective_seconds) if trace.collective_seconds else ""),
        ("peak if nothing moves", f"{exact_bytes(trace.peak_bytes)}, in {trace.peak_stage}"),
        ("floor (smallest budget)", f"{exact_bytes(trace.floor_bytes)}, set by {trace.floor_stage}"),
        ("can be recomputed", _recompute(trace.recompute)),
        ("active on average", f"{trace.mean_active_fraction:.1%} of the bytes that may move"),
    )
    phases = table_of("phase", ">stages", ">time")
    for phase in trace.phases:
        phases.add_row(phase.phase, str(phase.stages), format_seconds(phase.duration_seconds))
    kinds = table_of("kind", ">blocks", ">size", ">may move")
    for kind in trace.kinds:
        size, movable = format_bytes(kind.size_bytes), format_bytes(kind.movable_bytes)
        kinds.add_row(kind.kind, str(kind.blocks), size, movable)
    longest = sorted(trace.stages, key=lambda stage: -stage.duration_seconds)[:rows]
    stages = table_of(">stage", "name", ">time", ">workspace", ">if nothing moves")
    for stage in longest:
        sizes = format_bytes(stage.workspace_bytes), format_bytes(stage.live_bytes)
        stages.add_row(str(stage.id), plain(stage.name), format_seconds(stage.duration_seconds), *sizes)
    blocks = table_of(">block", "name", "kind", ">size", ">active", "copy", "used by stages")
    for block in trace.blocks[:rows]:
        used = f"{block.active_fraction:.1%}", "clean" if block.clean else "dirty", _some(block.uses)
        blocks.add_row(str(block.id), plain(block.name), block.kind, format_bytes(block.size_bytes), *used)
    return (
        overview,
        phases,
        kinds,
        *_updates(trace.updates),
        *_not_recomputed(trace.recompute),
        _memory(trace),
        *_links(trace.hardware),
        section("longest stages", stages, len(trace.stages)),
        section("largest blocks", blocks, len(trace.blocks)),
        _idlest(trace.blocks, rows),
    )


def _updates(updates: Sequence[UpdateSummary]) -> Page:
    """Return the times of the updates on the device (all subgroups) and on the host (those that can be updated there)."""
    if not updates:
        return ()
    table = table_of("can update on", ">subgroups", ">elements", ">time")
    for update in updates:
        table.add_row(update.where, str(update.subgroups), f"{update.elements:,}", format_seconds(update.seconds))
    return (table,)


def _recompute(recompute: RecomputeSummary) -> str:
    """Return what the groups make and what that takes, against the time of copying it out and in; empty without groups."""
    if not recompute.groups:
        return ""
    made = f"{format_bytes(recompute.size_bytes)} by {recompute.groups} stages, in {format_seconds(recompute.seconds)}"
    return made + ("" if recompute.copy_seconds is None else f" (to copy out and in: {format_seconds(recompute.copy_seconds)})")


def _not_recomputed(recompute: RecomputeSummary) -> Page:
    """Return why forward stages cannot run again, the most frequent reason first."""
    if not recompute.not_recomputed:
        return ()
    table = table_of("cannot be recomputed, because", ">stages", "such as")
    for entry in recompute.not_recomputed:
        table.add_row(plain(entry.reason), str(entry.stages), plain(entry.example))
    return (table,)


def _links(hardware: Hardware) -> Page:
    paths = any(link.path for link in hardware.links)
    links = table_of("link", ">rate", ">latency", *(["path"] if paths else []))
    for link in hardware.links:
        cells = link.name, _rate(link.bytes_per_second), format_seconds(link.latency_seconds)
        links.add_row(*cells, *([plain(link.path)] if paths else []))
    if not hardware.shared:
        return (links,)
    shared = table_of("shared rate", ">at the most", "by")
    for rate in hardware.shared:
        shared.add_row(plain(rate.name), _rate(rate.bytes_per_second), ", ".join(rate.links))
    return links, shared


def _rate(bytes_per_second: float) -> str:
    return f"{format_bytes(bytes_per_second)}/s"


def _memory(trace: TraceSummary) -> Group:
    """Return a row of bars for each kind of block: its bytes over the iteration if no block ever leaves."""
    stages = trace.stages
    count = min(len(stages), _COLUMNS)
    columns = [stages[len(stages) * n // count : len(stages) * (n + 1) // count] for n in range(count)]
    table = table_of("kind", ">most at once")
    table.add_column("stage after stage", no_wrap=True)
    table.add_row("phase", "", "".join(column[0].phase[0] for column in columns))
    for kind in trace.kinds:
        sizes = [stage.bytes_by_kind[kind.kind] for stage in stages]
        bars = _bars([[stage.bytes_by_kind[kind.kind] for stage in column] for column in columns], trace.peak_bytes)
        table.add_row(kind.kind, format_bytes(max(sizes)), bars)
    most = format_bytes(max(stage.workspace_bytes for stage in stages))
    table.add_row("workspace", most, _bars([[s.workspace_bytes for s in column] for column in columns], trace.peak_bytes))
    all_of_it = _bars([[stage.live_bytes for stage in column] for column in columns], trace.peak_bytes)
    table.add_row("in all", format_bytes(trace.peak_bytes), all_of_it)
    title = "memory over time if nothing moves (f forward, b backward, o optimizer, u user)"
    return Group(Text(title, style="bold"), table)


def _bars(columns: Sequence[Sequence[int]], full: int) -> str:
    """Return a character for each column that shows its largest value as a share of `full`; a dot for 0."""
    steps = len(_LEVELS) - 1
    return "".join(_LEVELS[-(-max(column) * steps // full) if full else 0] for column in columns)


def _idlest(blocks: Sequence[BlockSummary], rows: int) -> Group:
    """Return the movable blocks that are idle the most."""
    idle = idlest_blocks(blocks)
    table = table_of(">block", "name", "kind", ">size", ">longest idle", ">idle in all", "copy")
    for block in idle[:rows]:
        table.add_row(
            str(block.id),
            plain(block.name),
            block.kind,
            format_bytes(block.size_bytes),
            format_seconds(block.longest_idle_seconds),
            format_seconds(block.idle_seconds),
            "clean" if block.clean else "dirty",
        )
    return section("idlest blocks (size x longest inactive period)", table, len(idle))


def _some(stages: tuple[int, ...], most: int = 6) -> str:
    listed = ", ".join(str(stage) for stage in stages[:most])
    return listed if len(stages) <= most else f"{listed}, … ({len(stages)})"
