"""Prefetches that wait for room, and which of them were late."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from runtime.paging.account import MemoryAccount
from runtime.paging.block import DROPPED, OFFLOADED, ON_DEVICE, PREFETCHING, Block
from runtime.paging.block_table import BlockTable
from runtime.paging.transitions import BlockTransitions

_NOT_FETCHED = (ON_DEVICE, PREFETCHING, DROPPED)


class PrefetchQueue:
    """Begins prefetches in the order in which they were asked for, as soon as each has room. With the pager's lock held.

    in_user_code: no compiled region runs, so that no copy of a block that user code can reach may begin.
    """

    def __init__(self, account: MemoryAccount, table: BlockTable, transitions: BlockTransitions) -> None:
        self.in_user_code = True
        self._account = account
        self._table = table
        self._transitions = transitions
        self._waiting: deque[Block] = deque()
        self._beginning = False
        self._late: list[tuple[Block, float]] = []

    def ask_for(self, blocks: Sequence[Block]) -> None:
        """Add prefetches of those blocks that are not on the device, and begin those that have room."""
        asked = [block for block in blocks if block.state not in _NOT_FETCHED]
        self._waiting.extend(asked)
        self.begin_ready()
        for block in asked:
            block.held_back = block.state is not PREFETCHING

    def clear(self) -> None:
        """Drop the prefetches that have not begun."""
        self._waiting.clear()

    def begin_ready(self) -> None:
        """Begin the prefetches that have room, strictly in order."""
        if self._beginning or not self._waiting:  # a copy that ended at once calls again
            return
        self._beginning = True
        try:
            while self._waiting and self._begin_first():
                pass
        finally:
            self._beginning = False

    def _begin_first(self) -> bool:
        """Begin or drop the first prefetch in the queue, or take one obstacle away. False if it has to wait."""
        block, transitions = self._waiting[0], self._transitions
        if block.storage() is None or block.state in _NOT_FETCHED:
            self._waiting.popleft()
            return True
        if block in transitions.reserved_for_host:
            return False
        if block in transitions.queued_offloads and self._account.free_bytes >= 0:
            transitions.keep(block)  # nobody needs its memory: it need not leave
            return True
        if block.state is not OFFLOADED or (self.in_user_code and block.user_visible):
            return False
        short = block.size_bytes - self._account.free_bytes
        if short > 0 and not self._can_free(short):
            return False
        self._waiting.popleft()
        transitions.begin_prefetch(block)
        return True

    def _can_free(self, short: int) -> bool:
        """Take the memory of queued offloads if that makes so many bytes free. Returns whether it does."""
        takeable: list[Block] = []
        more = short
        for block in self._transitions.queued_offloads:
            if not block.pins and block.copy_is_valid:
                takeable.append(block)
                more -= block.size_bytes
                if more <= 0:
                    break
        else:
            return False
        for block in takeable:
            short -= self._transitions.take_memory(block)
        return short <= 0

    # -- late prefetches

    def note_late(self, coming: list[Block], seconds: float) -> None:
        """Move those of `coming` that have landed to the late ones: a stage has waited so long for them."""
        for block in [b for b in coming if b.state is ON_DEVICE]:
            coming.remove(block)
            self._late.append((block, seconds))

    def take_late(self) -> list[tuple[Block, float]]:
        """Return the late prefetches since the last call, see `Pager.take_late`."""
        late, self._late = self._late, []
        return late
