"""Links in a replay: each serves its queue in order, and links that share a rate divide it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from planner.problem import max_min_rates
from planner.schema import Hardware, Link

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
    """A link and its queue. `event`: when the transfer under way, or its latency, ends; infinite if there is none.

    A link that shares a rate with others has `left` bytes to move at `rate`, from the time `since` on.
    """

    link: Link
    shares: bool
    queue: deque[QueuedTransfer] = field(default_factory=deque)
    active: QueuedTransfer | None = None
    began: float = 0.0
    event: float = inf
    order: int = 0
    moving: bool = False
    left: float = 0.0
    since: float = 0.0
    rate: float = 0.0


class Links:
    """All links of a machine. A transfer takes latency + size / rate; it takes longer where a shared rate is used up."""

    def __init__(self, hardware: Hardware) -> None:
        sharing = {name for shared in hardware.shared for name in shared.links}
        self.channels = {link.name: Channel(link, link.name in sharing) for link in hardware.links}
        self._shared = [(shared.bytes_per_second, [self.channels[name] for name in shared.links]) for shared in hardware.shared]
        self._rates: dict[tuple[Channel, ...], list[float]] = {}
        self._begun = 0

    def next(self) -> Channel | None:
        """Return the link with the next event; of several at the same time, the one that began first. None if all are idle."""
        first: Channel | None = None
        for channel in self.channels.values():
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
            self._divide(now)
        return ended

    def _divide(self, now: float) -> None:
        """Divide the shared rates again, since a transfer has joined or left."""
        moving = [channel for channel in self.channels.values() if channel.shares and channel.moving]
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
