"""Replay the plans of all ranks of a machine together: each is bound by its own compute, and they share what the node says.

Each rank follows [Note: execution semantics] in `planner.simulator.simulate` for itself. They begin an iteration together, as
data-parallel training makes them: the first stage starts when every rank has reached it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from planner.errors import InfeasiblePlanError, PlanError
from planner.schema import Hardware, Node, Plan, Trace
from planner.simulator.links import Links
from planner.simulator.simulate import MAX_ITERATIONS, as_planned, replay_of
from planner.simulator.timeline import Timeline, agree

__all__ = ["NodeTimeline", "simulate_node"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTimeline:
    """What the plans of all ranks do in one iteration of the steady state.

    `ranks`: by rank. `iteration_seconds` of each is that of the machine: it includes the wait for slower ranks.
    """

    ranks: tuple[Timeline, ...]

    @property
    def iteration_seconds(self) -> float:
        """From one common start to the next."""
        return self.ranks[0].iteration_seconds

    def own_seconds(self, rank: int) -> float:
        """Return the time after which a rank has run its stages. From then on it waits for the others."""
        return self.ranks[rank].stages[-1].end_seconds

    def moved_bytes(self, link: str) -> int:
        """Return the bytes that all ranks move over a link in an iteration."""
        return sum(timeline.moved_bytes.get(link, 0) for timeline in self.ranks)


def simulate_node(node: Node, traces: Sequence[Trace], plans: Sequence[Plan]) -> NodeTimeline:
    """Replay the plan of each rank on its trace, together. `traces`, `plans`: by rank.

    A link that was measured alone has that rate here; what sharing costs follows from the node. With one rank and nothing shared,
    this is `simulate`. Takes about as long as replaying each plan by itself.

    Raises PlanError when the number of traces or plans is not that of the ranks, and otherwise as `simulate` does: an
    InfeasiblePlanError names the rank. It is raised too where the lower tiers of all ranks hold more than the node has.
    """
    if not len(traces) == len(plans) == node.ranks:
        raise PlanError(
            f"{node.name} has {node.ranks} ranks, found {len(traces)} traces and {len(plans)} plans: give one for each"
        )
    replay = _NodeReplay(node, traces, plans)
    previous: tuple[Timeline, ...] | None = None
    for _ in range(MAX_ITERATIONS):
        timelines = replay.one_iteration()
        if previous is not None and all(agree(one, other) for one, other in zip(previous, timelines, strict=True)):
            break
        previous = timelines
    _check_capacity(node, timelines)
    return NodeTimeline(ranks=tuple(as_planned(plan, timeline) for plan, timeline in zip(plans, timelines, strict=True)))


def _check_capacity(node: Node, timelines: Sequence[Timeline]) -> None:
    for tier, limit in (("host", node.host_memory_bytes), ("storage", node.storage_bytes)):
        used = sum(timeline.peak_bytes[tier] for timeline in timelines)
        if limit is not None and used > limit:
            raise InfeasiblePlanError(
                f"the {tier} tiers of the {node.ranks} ranks hold {used:,} bytes together; {node.name} has {limit:,}: plan "
                "the ranks together, or lower their budgets"
            )


class _NodeReplay:
    """The replays of all ranks, moved on event by event in the order of time.

    `_until`: by rank, when the stage that runs ends; infinite while the rank waits. `_runs`: the iterations under way; None for a
    rank that has reached the next one and waits there for the others.
    """

    def __init__(self, node: Node, traces: Sequence[Trace], plans: Sequence[Plan]) -> None:
        self._links = Links([_alone(trace) for trace in traces], node.shared)
        self._ranks = [
            replay_of(trace, plan, self._links, rank) for rank, (trace, plan) in enumerate(zip(traces, plans, strict=True))
        ]
        self._runs: list[Iterator[float] | None] = [None] * len(self._ranks)
        self._until = [inf] * len(self._ranks)
        self._now = 0.0
        for replay in self._ranks:
            replay.arrive()

    def one_iteration(self) -> tuple[Timeline, ...]:
        """Replay one iteration of all ranks. Times count from its common start."""
        for rank, replay in enumerate(self._ranks):
            replay.now = self._now
            replay.begin()
            self._runs[rank] = replay.run()
        for rank in range(len(self._ranks)):
            self._go_on(rank)
        while any(run is not None for run in self._runs):
            self._next_event()
        for replay in self._ranks:
            replay.now = self._now
        return tuple(replay.timeline() for replay in self._ranks)

    def _go_on(self, rank: int) -> None:
        """Let a rank run its next stage, if it can. After the last one, let it reach the next iteration."""
        run = self._runs[rank]
        if run is None:
            return
        self._until[rank] = next(run, -inf)
        if self._until[rank] == -inf:
            self._runs[rank], self._until[rank] = None, inf
            self._ranks[rank].arrive()

    def _next_event(self) -> None:
        """Carry out what comes next. At equal times: first links, then updates on the host, then ends of stages."""
        channel = self._links.next()
        updating = min(self._ranks, key=lambda replay: replay.processor.event)
        running = min(range(len(self._ranks)), key=self._until.__getitem__)
        times = (inf if channel is None else channel.event, updating.processor.event, self._until[running])
        self._now = min(times)
        if self._now == inf:
            raise self._stuck()
        if channel is not None and times[0] == self._now:
            rank = channel.rank
            job = self._links.proceed(channel)
            self._ranks[rank].now = self._now
            if job is not None:
                self._ranks[rank].complete_transfer(channel, job)
        elif times[1] == self._now:
            rank = self._ranks.index(updating)
            updating.now = self._now
            updating.complete_update()
        else:
            rank = running
            self._ranks[rank].now = self._now
            self._until[rank] = inf
        if self._until[rank] == inf:
            self._go_on(rank)

    def _stuck(self) -> InfeasiblePlanError:
        rank = next(number for number, run in enumerate(self._runs) if run is not None)
        error = self._ranks[rank].stuck()
        return InfeasiblePlanError(f"rank {rank}: {error}", stage=error.stage, block=error.block)


def _alone(trace: Trace) -> Hardware:
    """The rank's links at the rates that they have while the other ranks are idle."""
    links = (link.model_copy(update={"bytes_per_second": link.own_bytes_per_second}) for link in trace.hardware.links)
    return trace.hardware.model_copy(update={"links": tuple(links)})
