"""The summaries of the ranks of a machine as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from teraio.cli.node_summary import NodeReplaySummary, NodeSummary, RankReplaySummary, RankTraceSummary, ResourceSummary
from teraio.cli.tables import Page, exact_bytes, facts, format_bytes, format_seconds, plain, share, table_of

__all__ = ["node_replay_tables", "node_tables"]


def node_tables(node: NodeSummary) -> Page:
    """Return a machine: overview, ranks, what they share."""
    overview = facts(
        ("machine", node.name),
        ("ranks", str(len(node.ranks))),
        ("host memory", "" if node.host_memory_bytes is None else exact_bytes(node.host_memory_bytes)),
        ("storage", "" if node.storage_bytes is None else exact_bytes(node.storage_bytes)),
    )
    return overview, Group(Text("ranks", style="bold"), _traces(node.ranks)), *_shared(node.shared)


def node_replay_tables(replay: NodeReplaySummary) -> Page:
    """Return a replay: overview, ranks, the work of what they share."""
    apart = replay.apart_seconds
    gain = (
        ""
        if apart is None
        else f"{format_seconds(apart)}, {share(apart - replay.iteration_seconds, replay.iteration_seconds)} more"
    )
    overview = facts(
        ("machine", replay.name),
        ("ranks", str(len(replay.ranks))),
        ("iteration", format_seconds(replay.iteration_seconds)),
        ("planned with", replay.way or ""),
        ("planned apart", gain),
        ("written to storage", exact_bytes(replay.storage_written_bytes)),
    )
    return overview, Group(Text("ranks", style="bold"), _replays(replay.ranks)), *_shared(replay.shared)


def _traces(ranks: Sequence[RankTraceSummary]) -> Table:
    links = list(dict.fromkeys(link for rank in ranks for link in rank.link_bytes_per_second))
    collectives = any(rank.collective_seconds for rank in ranks)
    columns = (*([">in collectives", ">of that waiting"] if collectives else []), *(f">{link}" for link in links))
    table = table_of(">rank", "trace", ">stages", ">without waiting", ">peak", ">smallest budget", *columns)
    for rank in ranks:
        rates = rank.link_bytes_per_second
        table.add_row(
            str(rank.rank),
            plain(rank.trace),
            str(rank.stages),
            format_seconds(rank.ideal_seconds),
            format_bytes(rank.peak_bytes),
            format_bytes(rank.floor_bytes),
            *([format_seconds(rank.collective_seconds), _seconds(rank.waited_for_ranks_seconds)] if collectives else []),
            *(f"{format_bytes(rates[link])}/s" if link in rates else "" for link in links),
        )
    return table


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)


def _replays(ranks: Sequence[RankReplaySummary]) -> Table:
    alone = any(rank.alone_seconds is not None for rank in ranks)
    table = table_of(
        ">rank",
        "trace",
        ">takes",
        ">waits for others",
        ">stall",
        ">without waiting",
        *([">alone"] if alone else []),
        "critical path",
    )
    for rank in ranks:
        parts = ", ".join(f"{name} {share(seconds, rank.own_seconds)}" for name, seconds in rank.critical.items())
        table.add_row(
            str(rank.rank),
            plain(rank.trace),
            format_seconds(rank.own_seconds),
            format_seconds(rank.waits_seconds),
            format_seconds(rank.stall_seconds),
            format_seconds(rank.ideal_seconds),
            *([format_seconds(rank.alone_seconds or 0.0)] if alone else []),
            parts,
        )
    return table


def _shared(resources: Sequence[ResourceSummary]) -> Page:
    if not resources:
        return (Text("the ranks share no rate"),)
    used = any(resource.moved_bytes is not None for resource in resources)
    table = table_of("shared", "links", "ranks", ">together", *((">moved", ">of what it can") if used else (">equal share",)))
    for each in resources:
        last = (
            (format_bytes(each.moved_bytes or 0), share(each.busy_share or 0.0, 1.0))
            if used
            else (f"{format_bytes(each.bytes_per_second / len(each.ranks))}/s",)
        )
        table.add_row(
            plain(each.name),
            ", ".join(each.links),
            _numbers(each.ranks),
            f"{format_bytes(each.bytes_per_second)}/s",
            *last,
        )
    return (table,)


def _numbers(ranks: Sequence[int]) -> str:
    """Return "0-7" for ranks in a row, otherwise all of them."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))
