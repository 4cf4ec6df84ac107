"""What a replay's blocks compete for: links, of which some share a rate, the host's processor, and room in the lower tiers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from planner.errors import InfeasiblePlanError
from planner.problem import max_min_rates
from planner.schema import Budgets, Hardware, Link, Trace, WaitingTier
from planner.simulator.program import ReplayProgram
from planner.simulator.timeline import HostUpdate, Standing


@dataclass(slots=True)
class QueuedTransfer:
    """One transfer that waits in a queue or is under way."""

    move: int
    block: int
    size: int
    inward: bool
    tier: WaitingTier
    queued: float


@dataclass(slots=True, eq=False)
class Channel:
    """A link and its queue. `event`: when the transfer under way, or its latency, ends; infinite if there is none.

    A link that shares a rate with others (`shares`) has `left` bytes to move at `rate`, from the time `since` on.
    """

    link: Link
    shares: bool = False
    queue: deque[QueuedTransfer] = field(default_factory=deque)
    active: QueuedTransfer | None = None
    began: float = 0.0
    event: float = inf
    order: int = 0
    moving: bool = False
    left: float = 0.0
    since: float = 0.0
    rate: float = 0.0

    def standing(self, now: float) -> Standing:
        """Return what waits and moves, and its times from `now` on."""
        waiting = [(job.move, job.inward) for job in self.queue]
        times = [job.queued - now for job in self.queue]
        if self.active is None:
            return (self.link.name, None, waiting), tuple(times)
        times += [self.active.queued - now, self.began - now, self.event - now]
        if self.shares and self.moving:
            times += [self.since - now, self.left / self.link.bytes_per_second]
        under_way = (self.active.move, self.active.inward, self.moving, self.rate if self.shares and self.moving else 0.0)
        return (self.link.name, under_way, waiting), tuple(times)


class Links:
    """All links of a machine. A transfer takes latency + size / rate; it takes longer where a shared rate is used up.

    `channels`: by name of the link.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.channels = {link.name: Channel(link) for link in hardware.links}
        self._all = [*self.channels.values()]
        self._shared = [(rate.bytes_per_second, [self.channels[name] for name in rate.links]) for rate in hardware.shared]
        for _, members in self._shared:
            for channel in members:
                channel.shares = True
        self._sharing = [channel for channel in self.channels.values() if channel.shares]
        self._rates: dict[tuple[Channel, ...], list[float]] = {}
        self._begun = 0

    def next(self) -> Channel | None:
        """Return the link with the next event; of several at the same time, the one that began first. None if all are idle."""
        first, soonest = None, inf
        for channel in self._all:
            if channel.event < soonest or (first is not None and channel.event == soonest and channel.order < first.order):
                first, soonest = channel, channel.event
        return first

    def begin(self, channel: Channel, now: float) -> None:
        """Begin the head of the queue of an idle link."""
        job = channel.queue.popleft()
        self._begun += 1
        channel.active, channel.began, channel.order = job, now, self._begun
        if channel.shares:
            channel.left, channel.moving, channel.event = float(job.size), False, now + channel.link.latency_seconds
        else:
            channel.moving, channel.event = True, now + channel.link.seconds(job.size)

    def proceed(self, channel: Channel) -> QueuedTransfer | None:
        """Go on to `channel.event`. Return the transfer that has ended, or None if only the latency is over."""
        now = channel.event
        ended = channel.active if channel.moving else None
        if ended is not None:
            channel.active, channel.event, channel.moving = None, inf, False
        else:
            channel.moving, channel.since, channel.rate = True, now, 0.0
        if channel.shares:
            self._divide(now)
        return ended

    def _divide(self, now: float) -> None:
        """Divide the shared rates again, since a transfer has joined or left."""
        moving = [channel for channel in self._sharing if channel.moving]
        for channel, rate in zip(moving, self._fair_rates(moving), strict=True):
            left = channel.left - channel.rate * (now - channel.since)
            channel.left = left = left if left > 0.0 else 0.0
            channel.since, channel.rate, channel.event = now, rate, now + left / rate

    def _fair_rates(self, moving: Sequence[Channel]) -> list[float]:
        """The rates of links that are busy together. There are few such sets, so each is worked out once."""
        key = tuple(moving)
        if key not in self._rates:
            groups = [(rate, [n for n, channel in enumerate(moving) if channel in members]) for rate, members in self._shared]
            self._rates[key] = max_min_rates([channel.link.bytes_per_second for channel in moving], groups)
        return self._rates[key]


class HostProcessor:
    """The queue of updates, and the one that runs: one at a time, see [Note: updates on the host] in
    `planner.problem.host_updates`.

    `landed`: gradients that have been copied out and are not yet consumed. `stale`: parameters that wait for their update.
    `event`: when the update under way ends; infinite if there is none.
    """

    def __init__(self, source: Trace, program: ReplayProgram) -> None:
        self._source, self._program = source, program
        self._queue: deque[tuple[int, float]] = deque()
        self._active: tuple[int, float, float] | None = None  # subgroup, when it was queued, when it began
        self.landed: set[int] = set()
        self.stale: set[int] = set()
        self.event = inf

    @property
    def idle(self) -> bool:
        """Whether no update is queued or under way."""
        return self._active is None and not self._queue

    def standing(self, now: float) -> Standing:
        """Return what waits and runs, and its times from `now` on."""
        under_way = [self._active[:1] if self._active else None, *(subgroup for subgroup, _ in self._queue)]
        times = [queued - now for _, queued in self._queue]
        if self._active:
            times += [time - now for time in (*self._active[1:], self.event)]
        return (under_way, set(self.landed), set(self.stale)), tuple(times)

    def add(self, subgroup: int, now: float) -> None:
        """Queue an update."""
        self._queue.append((subgroup, now))

    def begin(self, now: float) -> None:
        """Begin the head of the queue, if no update runs and its gradients are there."""
        if self._active is None and self._queue and self._program.gradients[self._queue[0][0]] <= self.landed:
            subgroup, queued = self._queue.popleft()
            self._active = (subgroup, queued, now)
            self.event = now + (self._source.subgroups[subgroup].host_seconds or 0.0)

    def end(self, origin: float) -> HostUpdate:
        """End the update under way, and return it. Its times count from `origin`."""
        assert self._active is not None  # `event` was finite
        subgroup, queued, began = self._active
        done = HostUpdate(
            subgroup=subgroup, queued_seconds=queued - origin, start_seconds=began - origin, end_seconds=self.event - origin
        )
        self._active, self.event = None, inf
        self.landed -= self._program.gradients[subgroup]
        self.stale -= self._program.parameters[subgroup]
        return done


class TierUsage:
    """Bytes used in each lower tier.

    A copy has its place from its start until its block dies; in the tiers `lasting` (by block) for good.

    `peak_bytes`: the most bytes that were used, by tier.
    """

    def __init__(self, trace: Trace, budgets: Budgets, lasting: Sequence[frozenset[WaitingTier]]) -> None:
        self._trace = trace
        self._limits: dict[WaitingTier, int | None] = {"host": budgets.host_bytes, "storage": budgets.storage_bytes}
        self._lasting = lasting
        self._held: list[frozenset[WaitingTier]] = [frozenset()] * len(trace.blocks)
        self._used = dict.fromkeys(self._limits, 0)
        self.peak_bytes: dict[str, int] = {tier: 0 for tier in self._used}
        for block, tiers in enumerate(lasting):
            for tier in tiers:
                self.take(block, tier, stage=0)

    def take(self, block: int, tier: WaitingTier, *, stage: int) -> bool:
        """Record a copy that begins in `stage`, or that is there from the start. Return whether that takes room.

        Raises InfeasiblePlanError where there is no room.
        """
        if tier in self._held[block]:
            return False
        self._held[block] |= {tier}
        self._used[tier] += self._trace.blocks[block].size_bytes
        self.peak_bytes[tier] = max(self.peak_bytes[tier], self._used[tier])
        limit = self._limits[tier]
        if limit is not None and self._used[tier] > limit:
            raise InfeasiblePlanError(
                f"the {tier} tier would hold {self._used[tier]:,} bytes; its budget is {limit:,} bytes: raise "
                f"it, or move fewer blocks (the last was {self._trace.blocks[block].name!r})",
                stage=self._trace.stages[stage].name,
                block=self._trace.blocks[block].name,
            )
        return True

    def held(self) -> list[frozenset[WaitingTier]]:
        """The tiers that each block has a place in, by block."""
        return list(self._held)

    def give_back(self, block: int) -> frozenset[WaitingTier]:
        """Record that the block has died. Return the tiers where that leaves room."""
        held = self._held[block]
        if not held:
            return held
        freed = held - self._lasting[block]
        for tier in freed:
            self._used[tier] -= self._trace.blocks[block].size_bytes
        self._held[block] = held - freed
        return freed
