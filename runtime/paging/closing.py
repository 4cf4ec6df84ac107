"""The device is given away, for a while or for good: what leaves, what comes back, and what is left where it waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from planner.errors import StorageError
from runtime.device import MIN_MOVED_BYTES
from runtime.paging.around import in_reach_and_away
from runtime.paging.block import DROPPED, OFFLOADED, ON_DEVICE, Block
from runtime.paging.room import PrefetchQueue, RoomMaker, by_next_use
from runtime.paging.state import PagerPart, PagerState, awaited
from runtime.paging.transitions import BlockTransitions

_STILL = (ON_DEVICE, OFFLOADED, DROPPED)
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


class Closing(PagerPart):
    """Brings blocks back, and leaves the rest behind. Each public method takes the lock, and is for the training thread."""

    def __init__(self, state: PagerState, transitions: BlockTransitions, prefetches: PrefetchQueue) -> None:
        super().__init__(state)
        self._transitions = transitions
        self._prefetches = prefetches

    def bring_back(self, *, within_budget: bool = False) -> None:
        """Bring blocks to the device, those that are used soonest first; if `within_budget`, as long as the budget holds them.

        Dropped ones stay dropped. Waits until all copies have ended. Raises ChecksumError if some came back different, and
        StorageError if a copy failed: the first of them, when all others are back.
        """
        with self._signal.lock:
            damage: list[StorageError] = []
            self._prefetches.take()
            for block in list(self._account.queued_offloads):
                self._transitions.keep(block)
            self._wait_until_still(damage)
            self._transitions.forget_replaced()
            with _kept(damage):
                self._mover.invalidate(in_reach_and_away(self._table))
            self._fetch(within_budget, damage)
            if self._signal.out_of_memory is not None:
                self._device.give_back_memory()  # what is free in pieces serves in other sizes then
                self._fetch(within_budget, damage)
            self._signal.out_of_memory = None  # the rest stays where it is
            for block in [block for block in self._table if block.state is ON_DEVICE]:
                with _kept(damage):
                    self._mover.wait_resident([block])
            if damage:
                raise damage[0]

    def leave_behind(self) -> int:
        """Leave the blocks that are away to their storages: a slot is freed when its storage dies, or when another run has moved
        the content. Return their bytes. Waits for what still moves, if `bring_back` has failed; its errors have been told."""
        with self._signal.lock:
            with suppress(StorageError):  # a drive that does not answer keeps what it moves
                self._wait_until_still([])
            away = [block for block in self._table if block.state is OFFLOADED]
            for block in away:
                self._mover.leave_behind(block)
                self._transitions.forget(block)
            return sum(block.size_bytes for block in away)

    def away_bytes(self) -> int:
        """Return the bytes of blocks that are not on the device, and were not dropped."""
        with self._signal.lock:
            return sum(block.size_bytes for block in self._table if block.state is OFFLOADED)

    def _fetch(self, within_budget: bool, damage: list[StorageError]) -> None:
        """Ask once for each block that may come in, and wait until all have. damage: gets what stopped some."""
        self._signal.out_of_memory = None
        for block in by_next_use((b for b in self._table if b.state is OFFLOADED), self._account.clock):
            fits = not within_budget or block.size_bytes <= self._account.free_bytes
            if fits and self._signal.out_of_memory is None:
                self._transitions.begin_prefetch(block)
        self._wait_until_still(damage)

    def _wait_until_still(self, damage: list[StorageError]) -> None:
        while True:
            self._transitions.sweep()
            with _kept(damage):
                self._signal.raise_failure()
            moving: list[Block] = [block for block in self._table if block.state not in _STILL]
            if not moving:
                return
            self._signal.wait(lambda moving=moving: awaited(moving))  # type: ignore[misc]


@contextmanager
def _kept(damage: list[StorageError]) -> Iterator[None]:
    """Keep what says that a block did not come back, or came back different, to raise it when all others are back."""
    try:
        yield
    except StorageError as error:
        damage.append(error)
