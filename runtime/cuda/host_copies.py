"""The copies that a device with streams makes by itself between its memory and the host tier, and their counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from runtime.device import Event, Lane, Streams, TimedEvent
from runtime.storage import Extent, Slot
from runtime.system import annotate

_LINKS = {Lane.OUTWARD: "device->host", Lane.INWARD: "host->device"}


_Copy = tuple[str, int, TimedEvent, TimedEvent]
"""Link, bytes, begin and end of a copy to or from the host tier. It is counted once it has ended."""


class HostCopies:
    """Queues copies between the device and the host tier, and counts them.

    host_address: returns where an extent of the host tier lies in memory.
    moved_bytes, busy_seconds: of the copies that are known to have ended, by link, since the start. Of copies that follow each
    other, the time between them counts as well: it is what the host takes to queue the next one.
    """

    def __init__(self, streams: Streams, host_address: Callable[[Extent], int]) -> None:
        self._streams = streams
        self._host_address = host_address
        self._copies: deque[_Copy] = deque()
        self._ends: dict[Lane, TimedEvent] = {}
        self.moved_bytes = dict.fromkeys(_LINKS.values(), 0)
        self.busy_seconds = dict.fromkeys(_LINKS.values(), 0.0)

    def queue(self, lane: Lane, slot: Slot, size_bytes: int, address: int, *, follows: bool = False) -> Event:
        """Queue a copy of a slot's first `size_bytes` to or from the device memory at `address`. Return the event of its end.

        follows: nothing was queued in the lane since the last copy there: this one begins when that one ends.
        """
        streams, link, begin = self._streams, _LINKS[lane], 0
        before = (self._ends.get(lane) if follows else None) or streams.mark_lane(lane)
        with annotate("copy", lambda: f"{slot.name} {link}"):
            for extent in slot.extents:
                size = min(extent.length_bytes, size_bytes - begin)  # slots are rounded up, blocks are not
                on_device, on_host = address + begin, self._host_address(extent)
                target, source = (on_host, on_device) if lane is Lane.OUTWARD else (on_device, on_host)
                streams.copy(lane, target=target, source=source, size_bytes=size)
                begin += size
        self._ends[lane] = after = streams.mark_lane(lane)
        self._copies.append((link, size_bytes, before, after))
        return after

    def count(self) -> None:
        """Count the copies that have ended since the last call."""
        copies, moved, busy = self._copies, self.moved_bytes, self.busy_seconds
        while copies and copies[0][3].done():
            link, size_bytes, begin, end = copies.popleft()
            moved[link] += size_bytes
            busy[link] += end.seconds_since(begin)


class QueuedRange:
    """A `RangeCopy` that the device makes by itself. It keeps the memory alive until `wait` (rule 5)."""

    def __init__(self, streams: Streams, event: Event, memory: torch.Tensor) -> None:
        self._streams = streams
        self._event = event
        self._memory: torch.Tensor | None = memory

    def wait(self) -> None:
        """Order computation after the copy. The host never waits."""
        self._streams.wait(Lane.COMPUTE, self._event)
        self._memory = None
