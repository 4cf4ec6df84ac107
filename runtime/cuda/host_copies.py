"""The copies that a device with streams makes by itself to and from the host tier: what they wait for, and counters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from runtime.device import COMPUTE, INWARD, OUTWARD, Event, Lane, Streams, TimedEvent
from runtime.storage import Extent, Slot
from runtime.system import annotate

_LINKS = {OUTWARD: "device->host", INWARD: "host->device"}

# Bytes, begin and end of a copy to or from the host tier. It is counted once it has ended.
_Copy = tuple[int, TimedEvent, TimedEvent]


class HostCopies:
    """Queues copies between the device and the host tier, and counts them.

    host_address: returns where an extent of the host tier lies in memory.
    moved_bytes, busy_seconds: of the copies that are known to have ended, by link, since the start. Of copies that follow each
    other, the time between them counts as well: it is what the host takes to queue the next one.
    """

    def __init__(self, streams: Streams, host_address: Callable[[Extent], int]) -> None:
        self._streams = streams
        self._host_address = host_address
        self._copies: dict[Lane, list[_Copy]] = {lane: [] for lane in _LINKS}
        self._ends: dict[Lane, TimedEvent] = {}
        self.moved_bytes = dict.fromkeys(_LINKS.values(), 0)
        self.busy_seconds = dict.fromkeys(_LINKS.values(), 0.0)

    def queue(self, lane: Lane, slot: Slot, size_bytes: int, address: int, *, follows: bool = False) -> Event:
        """Queue a copy of a slot's first `size_bytes` to or from the device memory at `address`. Return the event of its end.

        follows: nothing was queued in the lane since the last copy there: this one begins when that one ends.
        """
        streams, left = self._streams, size_bytes
        before = (self._ends.get(lane) if follows else None) or streams.mark_lane(lane)
        with annotate("copy", slot.name, _LINKS[lane]):
            for extent in slot.extents:
                on_host, size = self._host_address(extent), extent.length_bytes
                if size > left:  # slots are rounded up, blocks are not
                    size = left
                if lane is OUTWARD:
                    streams.copy(lane, target=on_host, source=address, size_bytes=size)
                else:
                    streams.copy(lane, target=address, source=on_host, size_bytes=size)
                address, left = address + size, left - size
        self._ends[lane] = after = streams.mark_lane(lane)
        self._copies[lane].append((size_bytes, before, after))
        return after

    def count(self) -> None:
        """Count the copies that have ended since the last call. Those of a lane end in the order in which they were queued."""
        for lane, copies in self._copies.items():
            ended = bisect_left(copies, True, key=lambda copy: not copy[2].done())
            seconds, first = 0.0, 0
            for number in range(1, ended + 1):  # copies that follow each other are one
                if number == ended or copies[number][1] is not copies[number - 1][2]:
                    seconds += copies[number - 1][2].seconds_since(copies[first][1])
                    first = number
            self.moved_bytes[_LINKS[lane]] += sum([size for size, _, _ in copies[:ended]])
            self.busy_seconds[_LINKS[lane]] += seconds
            del copies[:ended]


class LastPoint:
    """The latest point in the lane of computation. As a context: copies begin together, and share one point.

    Only the training thread enters the context, with the lock of the pager held, and queues no stage within it. shares: False
    takes a point for each copy.
    """

    # So nothing comes into the lane of computation meanwhile, but for the mover's own waits for copies. It tells of them by
    # `passed`: memory that is freed after such a wait may serve the next copy in (rules 2 and 4).

    def __init__(self, streams: Streams, *, shares: bool = True) -> None:
        self._streams = streams
        self._shares = shares
        self._together = False
        self._event: Event | None = None
        self._held: set[Lane] = set()

    def __enter__(self) -> None:
        self._event, self._together = None, self._shares

    def __exit__(self, *_: object) -> None:
        self._event, self._together = None, False

    def passed(self) -> None:
        """Something was queued in the lane of computation."""
        self._event = None

    def event(self) -> Event:
        """Return the point after all computation that was queued so far."""
        if self._event is not None:
            return self._event
        event = self._streams.record(COMPUTE)
        self._held.clear()
        if self._together:
            self._event = event
        return event

    def hold(self, lane: Lane) -> bool:
        """Make what is queued in `lane` from now on wait for all computation that was queued so far.

        Returns False if it does so already: the last thing that was queued in the lane is a copy that has begun together with
        the next one.
        """
        if self._event is not None and lane in self._held:
            return False
        self._streams.wait(lane, self.event())
        self._held.add(lane)
        return True
