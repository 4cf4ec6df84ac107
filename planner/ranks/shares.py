"""What a rank may use of the rates that several ranks share: traces of single ranks that say so, for plans of single ranks.

A rank's plan is made as if it were alone on a machine on which each shared rate is its share. If all ranks are equal and carry
out equal plans, they copy at the same times. Then an equal share is exactly what each of them gets: the row Σ seconds_per_byte ·
bytes ≤ seconds over all links of all ranks is, in the variables of one rank, the row with its share.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.problem import max_min_rates
from planner.schema import Link, Node, NodeRate, SharedRate, Trace
from planner.simulator import NodeTimeline

__all__ = ["alone", "with_fair_shares", "with_what_others_leave"]


def alone(trace: Trace) -> Trace:
    """Return the trace with the rates that the rank's links have while the others are idle."""
    if all(link.alone_bytes_per_second is None for link in trace.hardware.links):
        return trace
    return _with_links(trace, [_plain(link, link.own_bytes_per_second) for link in trace.hardware.links])


def with_fair_shares(node: Node, traces: Sequence[Trace]) -> tuple[Trace, ...]:
    """Return, by rank, the trace in which each shared rate is the rank's max-min fair share while all ranks copy."""
    return tuple(_limited(trace, rank, node, [_fair(rate, traces) for rate in node.shared]) for rank, trace in enumerate(traces))


def with_what_others_leave(node: Node, traces: Sequence[Trace], timeline: NodeTimeline) -> tuple[Trace, ...]:
    """Return, by rank, the trace in which each shared rate is what the others leave of it on average, but no less than fair."""
    shares = []
    for rate in node.shared:
        fair, used = _fair(rate, traces), {}
        for rank in fair:
            moved = sum(timeline.ranks[rank].moved_bytes.get(link, 0) for link in rate.links)
            used[rank] = moved / (timeline.iteration_seconds or 1.0)
        everything = sum(used.values())
        shares.append({rank: max(fair[rank], rate.bytes_per_second - (everything - used[rank])) for rank in fair})
    return tuple(_limited(trace, rank, node, shares) for rank, trace in enumerate(traces))


def _fair(rate: NodeRate, traces: Sequence[Trace]) -> dict[int, float]:
    """By rank, its share while the links of all ranks are busy. Ranks without such links have none."""
    most = {
        rank: sum(link.own_bytes_per_second for link in traces[rank].hardware.links if link.name in rate.links)
        for rank in rate.members(len(traces))
    }
    most = {rank: size for rank, size in most.items() if size}
    shares = max_min_rates(list(most.values()), [(rate.bytes_per_second, range(len(most)))])
    return dict(zip(most, shares, strict=True))


def _limited(trace: Trace, rank: int, node: Node, shares: Sequence[dict[int, float]]) -> Trace:
    """Return the trace with the rank's shares: of one link as its rate, of several links as a rate that these share."""
    rates = {link.name: link.own_bytes_per_second for link in trace.hardware.links}
    shared = list(trace.hardware.shared)
    for rate, by_rank in zip(node.shared, shares, strict=True):
        mine = [name for name in rate.links if name in rates]
        if rank not in by_rank:
            continue
        for name in mine:
            rates[name] = min(rates[name], by_rank[rank])
        if len(mine) > 1:
            shared.append(SharedRate(name=f"share of {rate.name}", links=tuple(mine), bytes_per_second=by_rank[rank]))
    links = [_plain(link, rates[link.name]) for link in trace.hardware.links]
    if tuple(links) == trace.hardware.links and tuple(shared) == trace.hardware.shared:
        return trace
    return _with_links(trace, links, shared)


def _plain(link: Link, bytes_per_second: float) -> Link:
    return link.model_copy(update={"bytes_per_second": bytes_per_second, "alone_bytes_per_second": None})


def _with_links(trace: Trace, links: Sequence[Link], shared: Sequence[SharedRate] | None = None) -> Trace:
    kept = trace.hardware.shared if shared is None else tuple(shared)
    return trace.rebuilt(hardware=trace.hardware.model_copy(update={"links": tuple(links), "shared": kept}))
