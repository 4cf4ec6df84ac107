"""The results of the commands with --ranks: the ranks of a machine and what they share in numbers, also as JSON."""

from __future__ import annotations

from collections.abc import Sequence

import planner
from planner.problem import live_bytes
from planner.schema import FrozenModel
from planner.simulator import critical_path

__all__ = ["NodeReplaySummary", "NodeSummary", "summarise_node", "summarise_node_replay"]


class RankTraceSummary(FrozenModel):
    """The trace of one rank. `peak_bytes`: if no block ever leaves. `floor_bytes`: the smallest device budget.

    `collective_seconds`: the part of `ideal_seconds` in collectives. `waited_for_ranks_seconds`: the part of that in which it
    waited for slower ranks; None if the ranks have not the same collectives. `link_bytes_per_second`: the rate of each link
    while the other ranks are idle.
    """

    rank: int
    trace: str
    stages: int
    ideal_seconds: float
    collective_seconds: float
    waited_for_ranks_seconds: float | None
    peak_bytes: int
    floor_bytes: int
    link_bytes_per_second: dict[str, float]


class ResourceSummary(FrozenModel):
    """What several ranks share. `moved_bytes`, `busy_share` (of what an iteration could move): None without plans."""

    name: str
    links: tuple[str, ...]
    ranks: tuple[int, ...]
    bytes_per_second: float
    moved_bytes: int | None = None
    busy_share: float | None = None


class NodeSummary(FrozenModel):
    """The traces of all ranks, and what they share. Bytes: None where no limit is known."""

    name: str
    host_memory_bytes: int | None
    storage_bytes: int | None
    ranks: tuple[RankTraceSummary, ...]
    shared: tuple[ResourceSummary, ...]


class RankReplaySummary(FrozenModel):
    """One rank in the replay of all. `own_seconds`: until it has run its stages; then it waits for the others.

    `alone_seconds`: what a plan that it makes for itself takes if nothing is shared; None where that was not planned.
    `critical`: time on its critical path by resource; the sum is `own_seconds`.
    """

    rank: int
    trace: str
    policy: str
    own_seconds: float
    waits_seconds: float
    stall_seconds: float
    ideal_seconds: float
    alone_seconds: float | None
    peak_bytes: dict[str, int]
    moved_bytes: dict[str, int]
    critical: dict[str, float]


class NodeReplaySummary(FrozenModel):
    """The replay of the plans of all ranks together. `way`, `apart_seconds`: see `planner.NodePlans`; None for given plans."""

    name: str
    iteration_seconds: float
    way: str | None
    apart_seconds: float | None
    storage_written_bytes: int
    ranks: tuple[RankReplaySummary, ...]
    shared: tuple[ResourceSummary, ...]


def summarise_node(node: planner.Node, traces: Sequence[planner.Trace]) -> NodeSummary:
    """Return the ranks' traces in numbers. `traces`: by rank."""
    collectives = [_collectives(trace) for trace in traces]
    waited = planner.waited_for_ranks(collectives) or [None] * len(traces)
    return NodeSummary(
        name=node.name,
        host_memory_bytes=node.host_memory_bytes,
        storage_bytes=node.storage_bytes,
        ranks=tuple(
            RankTraceSummary(
                rank=rank,
                trace=trace.name,
                stages=len(trace.stages),
                ideal_seconds=trace.ideal_seconds,
                collective_seconds=sum(collectives[rank].values()),
                waited_for_ranks_seconds=waited[rank],
                peak_bytes=max(live_bytes(trace)),
                floor_bytes=planner.floor(trace)[0],
                link_bytes_per_second={link.name: link.own_bytes_per_second for link in trace.hardware.links},
            )
            for rank, trace in enumerate(traces)
        ),
        shared=tuple(_resource(node, rate) for rate in node.shared),
    )


def _collectives(trace: planner.Trace) -> dict[tuple[int, str], float]:
    return {(stage.id, stage.name): stage.collective_seconds for stage in trace.stages if stage.collective_seconds}


def summarise_node_replay(
    node: planner.Node,
    traces: Sequence[planner.Trace],
    plans: Sequence[planner.Plan],
    timeline: planner.NodeTimeline,
    made: planner.NodePlans | None = None,
) -> NodeReplaySummary:
    """Return the replay in numbers. `traces`, `plans`: by rank. made: how the plans were made, if they just were."""
    return NodeReplaySummary(
        name=node.name,
        iteration_seconds=timeline.iteration_seconds,
        way=None if made is None else made.way,
        apart_seconds=None if made is None or made.apart is None else made.apart.iteration_seconds,
        storage_written_bytes=sum(each.storage_written_bytes for each in timeline.ranks),
        ranks=tuple(
            RankReplaySummary(
                rank=rank,
                trace=trace.name,
                policy=plan.policy,
                own_seconds=timeline.own_seconds(rank),
                waits_seconds=timeline.iteration_seconds - timeline.own_seconds(rank),
                stall_seconds=timeline.ranks[rank].stall_seconds,
                ideal_seconds=trace.ideal_seconds,
                alone_seconds=None if made is None else made.alone_seconds[rank],
                peak_bytes=timeline.ranks[rank].peak_bytes,
                moved_bytes=timeline.ranks[rank].moved_bytes,
                critical=critical_path(trace, plan, timeline.ranks[rank]).seconds(),
            )
            for rank, (trace, plan) in enumerate(zip(traces, plans, strict=True))
        ),
        shared=tuple(_resource(node, rate, timeline) for rate in node.shared),
    )


def _resource(node: planner.Node, rate: planner.NodeRate, timeline: planner.NodeTimeline | None = None) -> ResourceSummary:
    ranks = rate.members(node.ranks)
    moved = busy = None
    if timeline is not None:
        moved = sum(timeline.ranks[rank].moved_bytes.get(link, 0) for rank in ranks for link in rate.links)
        most = rate.bytes_per_second * timeline.iteration_seconds
        busy = moved / most if most else 0.0
    return ResourceSummary(
        name=rate.name,
        links=rate.links,
        ranks=ranks,
        bytes_per_second=rate.bytes_per_second,
        moved_bytes=moved,
        busy_share=busy,
    )
