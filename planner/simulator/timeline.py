"""The result of a replay, and when two iterations of it are the same.

The critical path says why an iteration takes as long as it does: stages, copies and updates that fill it without a gap.

In a replay, everything begins at the instant at which the last thing that it waited for ended. By the rules of
[Note: execution semantics] in `planner.simulator.simulate`, these things are:

* for a stage: the stage before it, the copy in of a block that it uses, or a copy out that made room. User code also waits for
  copies in both directions of blocks that it can reach, and for updates on the host;
* for a copy: the stage at whose end it was queued, or the copy before it on the link;
* for a copy in also: a copy out or a stage whose end made room, user code that held it back, the block's own copy out, or the
  update that wrote the block;
* for an update on the host: the stage at whose end it was queued, the update before it, or its gradients' copy out.

So from the end of the last stage one can go back, from each segment to one that ended when it began, until the iteration's
start. Such a chain is a longest path in the graph of these waits, and its segments together take as long as the iteration. To
make the iteration shorter, every such chain needs a segment that becomes shorter or disappears.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from planner.problem import host_start, recomputed, user_stages
from planner.schema import Plan, Tier, Trace

_SAME = 1e-9  # share of the iteration by which times may differ: sums in another order round differently


class StageTimes(NamedTuple):
    """One stage in the steady state, in seconds from the end of the iteration before."""

    reached_seconds: float
    start_seconds: float
    end_seconds: float

    @property
    def stall_seconds(self) -> float:
        """How long the stage waited for its inputs and for room."""
        return self.start_seconds - self.reached_seconds


class Transfer(NamedTuple):
    """One transfer of a block over a link in the steady state. `move` is the index in the plan's moves."""

    move: int
    block: int
    link: str
    queued_seconds: float
    start_seconds: float
    end_seconds: float


class HostUpdate(NamedTuple):
    """The update of one subgroup on the host's processor in the steady state.

    It is queued as soon as only its gradients may be missing.
    """

    subgroup: int
    queued_seconds: float
    start_seconds: float
    end_seconds: float


# When a tier takes or loses bytes, in seconds from the end of the iteration before; which tier; for which block, as numbered in
# `planner.recomputed` (None: the workspace of the stage that runs); and how many.
MemoryChange = tuple[float, Tier, int | None, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What a plan does in one iteration of the steady state.

    Keys of `peak_bytes` are tiers; keys of `moved_bytes` are links (`"device->storage"` and the like). `memory`: the changes of
    all tiers in order. They begin with what is there when the iteration begins, so that the sum up to any change is what a tier
    holds then.
    """

    iteration_seconds: float
    stages: tuple[StageTimes, ...]
    transfers: tuple[Transfer, ...]
    peak_bytes: dict[str, int]
    moved_bytes: dict[str, int]
    storage_written_bytes: int
    updates: tuple[HostUpdate, ...] = ()
    memory: tuple[MemoryChange, ...] = ()

    @property
    def stall_seconds(self) -> float:
        """Sum of the stalls of all stages."""
        return sum(stage.stall_seconds for stage in self.stages)


# All that the next iteration depends on: what is where and under way, and the times of that, in seconds from now.
Standing = tuple[tuple[Any, ...], tuple[float, ...]]


def same(one: Standing, other: Standing, iteration_seconds: float) -> bool:
    """Whether the iterations after these are the same. Times may differ by a tiny share of the iteration's."""
    if one[0] != other[0] or len(one[1]) != len(other[1]):
        return False
    tolerance = _SAME * max(iteration_seconds, 1e-12)
    return all(abs(a - b) <= tolerance for a, b in zip(one[1], other[1], strict=True))


STAGES = "stages"
HOST_UPDATES = "host updates"


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSegment:
    """One stage, copy or update in an iteration of the steady state, in seconds from the iteration's start.

    `resource`: `"stages"`, `"host updates"` or the name of a link. `index`: of the stage or subgroup in the trace, or of the
    move in the plan. `block`: the block that a copy copies, otherwise None. A segment that began in the iteration before starts
    at 0.
    """

    resource: str
    index: int
    block: int | None
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        """How long it takes within the iteration."""
        return self.end_seconds - self.start_seconds


def seconds_by_resource(path: Iterable[PathSegment]) -> dict[str, float]:
    """Return how much of a critical path each resource takes, largest first. The sum is the iteration's time."""
    total: dict[str, float] = {}
    for segment in path:
        total[segment.resource] = total.get(segment.resource, 0.0) + segment.seconds
    return dict(sorted(total.items(), key=lambda entry: -entry[1]))


def critical_path(trace: Trace, plan: Plan, timeline: Timeline) -> tuple[PathSegment, ...]:
    """Return the critical path of `timeline`, the replay of `plan` on `trace`: from the iteration's start to its end, each
    segment begins when the one before ended. Other paths may be equally long.

    Time and memory are proportional to the number of stages and transfers; where many end at the same instant, to their square.
    """
    import networkx as nx  # it takes a fifth of a second, which a command that shows no path need not spend

    segments = _segments(timeline)
    waits = _Waits(recomputed(trace, plan.recompute), plan)
    ended: dict[float, list[int]] = {}
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(segments)))
    for number, segment in enumerate(segments):
        for earlier in ended.get(segment.start_seconds, ()):
            if waits.may_wait(segment, segments[earlier]):
                graph.add_edge(earlier, number, seconds=segments[earlier].seconds)
        ended.setdefault(segment.end_seconds, []).append(number)
    last = max(number for number, segment in enumerate(segments) if segment.resource == STAGES)
    # The path must end in the last stage, even if that takes no time.
    graph.add_edge(last, "end", seconds=segments[last].seconds + timeline.iteration_seconds + 1.0)
    chain = nx.dag_longest_path(graph, weight="seconds")
    return tuple(segments[number] for number in chain[:-1])


def _segments(timeline: Timeline) -> list[PathSegment]:
    """All segments of the iteration, in an order in which nothing comes before what it waited for.

    Only segments that take no time can begin and end at the same instant; of these, stages come first.
    """
    whole: list[tuple[str, int, int | None, StageTimes | HostUpdate | Transfer]] = [
        *((STAGES, number, None, stage) for number, stage in enumerate(timeline.stages)),
        *((HOST_UPDATES, update.subgroup, None, update) for update in timeline.updates),
        *((transfer.link, transfer.move, transfer.block, transfer) for transfer in timeline.transfers),
    ]
    found = [
        PathSegment(
            resource=resource,
            index=index,
            block=block,
            start_seconds=max(times.start_seconds, 0.0),
            end_seconds=times.end_seconds,
        )
        for resource, index, block, times in whole
    ]
    return sorted(found, key=lambda segment: (segment.end_seconds, segment.start_seconds))


class _Waits:
    """Which segments can wait for which, by the rules above. Does not compare their times."""

    def __init__(self, trace: Trace, plan: Plan) -> None:
        self.moves = plan.moves
        self.stages = len(trace.stages)
        self.updated = [frozenset(subgroup.blocks) for subgroup in trace.subgroups]
        self.user = frozenset(user_stages(trace))
        self.visible = frozenset(block.id for block in trace.blocks if block.user_visible)
        self.begin = [host_start(trace, subgroup) for subgroup in trace.subgroups]

    def may_wait(self, segment: PathSegment, earlier: PathSegment) -> bool:
        """Whether `segment` may have waited for `earlier`."""
        if segment.resource == STAGES:
            return self._stage_waits(segment, earlier)
        if earlier.resource == segment.resource:
            return True
        if segment.resource == HOST_UPDATES:
            if earlier.resource == STAGES:
                return earlier.index == self.begin[segment.index] - 1
            return _outward(earlier) and earlier.block in self.updated[segment.index]
        if _outward(segment):
            offload = self.moves[segment.index].offload
            return earlier.resource == STAGES and offload is not None and earlier.index == offload.start % self.stages
        if earlier.resource == HOST_UPDATES:
            return segment.block in self.updated[earlier.index]
        return earlier.resource == STAGES or _outward(earlier)

    def _stage_waits(self, segment: PathSegment, earlier: PathSegment) -> bool:
        if earlier.resource == STAGES:
            return earlier.index == segment.index - 1
        if earlier.resource == HOST_UPDATES:
            return segment.index in self.user
        if segment.index in self.user and earlier.block in self.visible:
            return True
        return _outward(earlier) or self.moves[earlier.index].before % self.stages == segment.index


def _outward(segment: PathSegment) -> bool:
    return segment.resource.startswith("device->")
