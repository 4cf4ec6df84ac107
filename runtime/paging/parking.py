"""The device is given away for a while: all blocks leave that can, and come back when the next region begins."""

from __future__ import annotations

from runtime.device import MIN_MOVED_BYTES
from runtime.paging.block import OFFLOADED, Block
from runtime.paging.room import PrefetchQueue, RoomMaker, by_next_use
from runtime.paging.state import PagerPart, PagerState

TOO_SMALL = f"in blocks of less than {MIN_MOVED_BYTES:,} bytes, and in small optimizer states"
NOT_MOVABLE = "in memory that is not teraio's to move"
HELD = "held by teraio.on_device"
NO_ROOM = "no lower tier has room"


class Parking(PagerPart):
    """Empties the device between two regions, and fills it again. Each public method takes the lock."""

    def __init__(self, state: PagerState, prefetches: PrefetchQueue, room: RoomMaker) -> None:
        super().__init__(state)
        self._prefetches = prefetches
        self._room = room
        self._due: dict[Block, None] = {}

    def park(self) -> int:
        """Let everything leave that can, and give free memory back to the system. Return the bytes that have left.

        Waits until all copies have ended; the time does not count, and nor do the evictions: training did not need the room.
        Raises StorageError if a copy failed; what has left by then comes back all the same.
        """
        with self._lock:
            here, asked = list(self._account.here), self._prefetches.take()
            try:
                self._room.empty(counts=False)
            finally:
                left = [block for block in here if block.state is OFFLOADED]
                self._due |= dict.fromkeys((*left, *asked))
            self._device.trim(0)
            return sum(block.size_bytes for block in left)

    def staying_bytes(self) -> dict[str, int]:
        """Return how much is on the device, by the reason why it is there."""
        with self._lock:
            found = {TOO_SMALL: self._account.fixed_bytes}
            for block in self._account.here:
                if block.size_bytes < MIN_MOVED_BYTES:
                    why = TOO_SMALL
                elif block.span is None and len(self._mover.tiers):
                    why = NOT_MOVABLE
                else:
                    why = HELD if block.pins else NO_ROOM
                found[why] = found.get(why, 0) + block.size_bytes
            return {why: size_bytes for why, size_bytes in found.items() if size_bytes}

    def wake(self) -> None:
        """A region begins: what has left comes back as far as there is room, what is used soonest first. Never waits."""
        if self._due:
            with self._lock, self._mover.together():
                due, self._due = self._due, {}
                self._prefetches.ask_for(by_next_use(due, self._account.clock))
