"""Links in a replay: each serves its queue in order, and links that share a rate divide it, also those of several ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from planner.problem import max_min_rates
from planner.schema import Hardware, Link, NodeRate

__all__ = ["Channel", "QueuedTransfer", "Links"]


@dataclass(slots=True)
class QueuedTransfer:
    """One transfer that waits in a queue or is under way."""

    move: int
    block: int
    size: int
    inward: bool
    tier: str
    queued: float


@dataclass(slots=True, eq=False)
class Channel:
    """A link of one rank and its queue. `event`: when the transfer under way, or its latency, ends; infinite if there is none.

    A link that shares a rate with others has `left` bytes to move at `rate`, from the time `since` on. Rates are divided anew
    among `company`: all links with shared rates of the ranks that share anything with this one.
    """

    link: Link
    rank: int
    shares: bool = False
    company: list[Channel] = field(default_factory=list)
    queue: deque[QueuedTransfer] = field(default_factory=deque)
    active: QueuedTransfer | None = None
    began: float = 0.0
    event: float = inf
    order: int = 0
    moving: bool = False
    left: float = 0.0
    since: float = 0.0
    rate: float = 0.0

    def standing(self, now: float) -> tuple[tuple[Any, ...], tuple[float, ...]]:
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
    """All links of all ranks of a machine; one rank if nothing else is said.

    A transfer takes latency + size / rate; it takes longer where a shared rate is used up. `hardware`: by rank. `shared`: what
    links of several ranks share, beyond what the hardware says of each rank's own. `channels`: by rank and name of the link.
    """

    def __init__(self, hardware: Sequence[Hardware], shared: Sequence[NodeRate] = ()) -> None:
        self.channels = [{link.name: Channel(link, rank) for link in each.links} for rank, each in enumerate(hardware)]
        self._all = [channel for channels in self.channels for channel in channels.values()]
        self._shared = [
            (rate.bytes_per_second, [self.channels[rank][name] for name in rate.links])
            for rank, each in enumerate(hardware)
            for rate in each.shared
        ]
        for rate in shared:
            self._shared.append((rate.bytes_per_second, self._members(rate)))
        for _, members in self._shared:
            for channel in members:
                channel.shares = True
        company = _companies(len(hardware), [{channel.rank for channel in members} for _, members in self._shared])
        for channel in self._all:
            channel.company = [other for other in self._all if other.shares and company[other.rank] == company[channel.rank]]
        self._rates: dict[tuple[Channel, ...], list[float]] = {}
        self._begun = 0

    def _members(self, rate: NodeRate) -> list[Channel]:
        mine = [self.channels[rank] for rank in rate.members(len(self.channels))]
        return [channels[name] for channels in mine for name in rate.links if name in channels]

    def next(self) -> Channel | None:
        """Return the link with the next event; of several at the same time, the one that began first. None if all are idle."""
        first: Channel | None = None
        for channel in self._all:
            if channel.active is not None and (first is None or (channel.event, channel.order) < (first.event, first.order)):
                first = channel
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
            self._divide(channel.company, now)
        return ended

    def _divide(self, company: Sequence[Channel], now: float) -> None:
        """Divide the shared rates again, since a transfer has joined or left."""
        moving = [channel for channel in company if channel.moving]
        for channel, rate in zip(moving, self._fair_rates(moving), strict=True):
            channel.left = max(channel.left - channel.rate * (now - channel.since), 0.0)
            channel.since, channel.rate = now, rate
            channel.event = now + channel.left / rate

    def _fair_rates(self, moving: Sequence[Channel]) -> list[float]:
        """The rates of links that are busy together. There are few such sets, so each is worked out once."""
        key = tuple(moving)
        if key not in self._rates:
            groups = [(rate, [n for n, channel in enumerate(moving) if channel in members]) for rate, members in self._shared]
            self._rates[key] = max_min_rates([channel.link.bytes_per_second for channel in moving], groups)
        return self._rates[key]


def _companies(ranks: int, sharing: Sequence[set[int]]) -> list[int]:
    """For each rank, a number that ranks have in common if they share something, also through others. sharing: sets of ranks."""
    company = list(range(ranks))
    for members in sharing:
        joined = {company[rank] for rank in members}
        company = [min(joined) if each in joined else each for each in company]
    return company
