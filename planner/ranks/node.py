"""What the ranks of a machine share, as far as their traces tell."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from planner.errors import TraceError
from planner.schema import Node, NodeRate, Trace, WaitingTier

__all__ = ["node_of"]

_LESS = 0.95
"""Ranks share a link if all together reach less than this of what each reaches alone; the rest is noise of measuring."""


def node_of(traces: Sequence[Trace], shared: Collection[WaitingTier] = (), *, name: str = "machine") -> Node:
    """Return the node on which the traces of all ranks were taken.

    Links that were measured both alone and together share what they reached together. The links of the tiers in `shared` are one
    resource: all ranks together reach the rate of the fastest rank's link. So does a rate that a trace says to be shared by links
    of one such tier, as those of a drive. All else is each rank's own.

    Raises TraceError if some ranks measured a link alone and others did not.
    """
    rates = [rate for link in _names(traces) for rate in _measured(traces, link)]
    known = {name for rate in rates for name in rate.links}
    for tier in sorted(shared):
        rates += _of_tier(traces, tier, known)
    return Node(name=name, ranks=len(traces), shared=tuple(rates))


def _names(traces: Sequence[Trace]) -> list[str]:
    return list(dict.fromkeys(link.name for trace in traces for link in trace.hardware.links))


def _measured(traces: Sequence[Trace], name: str) -> Iterator[NodeRate]:
    """The rate that the ranks reach together over one link, if it was measured and is less than what they reach alone."""
    links = {rank: link for rank, trace in enumerate(traces) for link in trace.hardware.links if link.name == name}
    alone = [link.alone_bytes_per_second for link in links.values() if link.alone_bytes_per_second is not None]
    if not alone:
        return
    if len(alone) < len(links):
        raise TraceError(
            f"{len(alone)} of {len(links)} traces give the rate of {name} alone: take the traces of all ranks from one training"
        )
    together = sum(link.bytes_per_second for link in links.values())
    if together < _LESS * sum(alone):
        yield _rate(f"{name} of all ranks", (name,), together, links)


def _of_tier(traces: Sequence[Trace], tier: WaitingTier, known: Collection[str]) -> Iterator[NodeRate]:
    own = {f"device->{tier}", f"{tier}->device"}
    for name in sorted(own.difference(known)):
        links = {rank: link for rank, trace in enumerate(traces) for link in trace.hardware.links if link.name == name}
        if links:
            yield _rate(f"{name} of all ranks", (name,), max(link.own_bytes_per_second for link in links.values()), links)
    within = [rate for trace in traces for rate in trace.hardware.shared if set(rate.links) <= own]
    if within and not own.intersection(known):
        most = max(within, key=lambda rate: rate.bytes_per_second)
        yield _rate(f"{most.name} of all ranks", most.links, most.bytes_per_second, range(len(traces)))


def _rate(name: str, links: Collection[str], bytes_per_second: float, ranks: Collection[int]) -> NodeRate:
    return NodeRate.model_validate(
        {"name": name, "links": tuple(links), "bytes_per_second": bytes_per_second, "ranks": tuple(ranks)}
    )
