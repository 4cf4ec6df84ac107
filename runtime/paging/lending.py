"""Blocks that are changed in their slots: the pager lends the slots to an update.

[Note: Lent slots]
A block that is UPDATING stays away until it is given back: it is neither prefetched nor evicted, and a hint for it waits.
The borrower keeps its storage alive and gives it back before the region ends. All copies from and to the slot must have
ended by then. A stage that needs the block waits until then.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.errors import StorageError
from runtime.paging.block import Block, State
from runtime.paging.block_table import BlockTable
from runtime.paging.copy_signal import CopySignal
from runtime.paging.prefetch_queue import PrefetchQueue
from runtime.paging.transitions import BlockTransitions
from runtime.system import checkpoint, first_of

POLL_SECONDS = 0.001
"""Seconds between two looks at a copy that the device makes by itself: nothing notifies of its end."""


class Lending:
    """Lends slots of blocks, see [Note: Lent slots] and the methods of `Pager`. All calls with the pager's lock held."""

    def __init__(self, table: BlockTable, signal: CopySignal, transitions: BlockTransitions, prefetches: PrefetchQueue) -> None:
        self._table = table
        self._transitions = transitions
        self._prefetches = prefetches
        self._signal = signal

    def lend(self, blocks: Sequence[Block]) -> None:
        """See `Pager.lend`."""
        while True:
            self._signal.raise_failure()
            checkpoint()
            for block in blocks:
                self._send_away(block)
            if all(block.state is State.OFFLOADED for block in blocks):
                break
            self._signal.wait(lambda: f"{first_of([block.name for block in blocks])} to leave the device")
        self._transitions.begin_update(blocks)

    def waits_in_host_tier(self, blocks: Sequence[Block]) -> bool:
        """See `Pager.waits_in_host_tier`."""
        away = all(block.state in (State.OFFLOADED, State.OFFLOADING, State.UPDATING) for block in blocks)
        return away and all(self._host_address(block) is not None for block in blocks)

    def reserve_for_host(self, blocks: Sequence[Block]) -> bool:
        """See `Pager.reserve_for_host`."""
        if any(b.state not in (State.OFFLOADED, State.OFFLOADING) or self._host_address(b) is None for b in blocks):
            return False
        self._transitions.reserved_for_host |= set(blocks)
        return True

    def lend_memory(self, blocks: Sequence[Block]) -> list[int] | None:
        """See `Pager.lend_memory`."""
        try:
            while self._still_leaving(blocks):
                self._signal.poll(POLL_SECONDS)  # gives the lock to others meanwhile
            if any(b.state is not State.OFFLOADED or b.pins or not self._table.is_current(b) for b in blocks):
                return None
            addresses = [address for b in blocks if (address := self._host_address(b)) is not None]
            if len(addresses) < len(blocks):
                return None
            self._transitions.begin_update(blocks)
            return addresses
        finally:
            self._end_reservation(blocks)

    def give_back(self, blocks: Sequence[Block]) -> None:
        """See `Pager.give_back`."""
        try:
            self._transitions.end_update(blocks)
        except BaseException:
            self._transitions.end_update(blocks)  # those that are left
            raise
        finally:
            self._end_reservation(blocks)
            self._signal.notify()

    def _end_reservation(self, blocks: Sequence[Block]) -> None:
        """Never fails: the training thread hears of errors."""
        self._transitions.reserved_for_host.difference_update(blocks)
        try:
            self._prefetches.begin_ready()
        except Exception as failure:
            self._signal.fail(failure)

    def _send_away(self, block: Block) -> None:
        if block.span is None or block.pins or block.dead:
            raise StorageError(f"{block} cannot leave, so that it cannot be lent; this is a bug in teraio, please report it")
        queued = self._transitions.queued_offloads
        while block.state is State.ON_DEVICE or block in queued:
            if block in queued:
                self._transitions.take_memory(block)
            else:
                self._transitions.begin_offload(block)

    def _still_leaving(self, blocks: Sequence[Block]) -> bool:
        """Whether a copy may still write to a slot, or read it: a block may be OFFLOADED before its last copy has ended."""
        finished, queued = self._transitions.need_mover().finished, self._transitions.queued_offloads
        for block in [b for b in blocks if b in queued and finished(b)]:
            self._transitions.take_memory(block)
        return any(b.state is State.OFFLOADING or b.state is State.OFFLOADED and not finished(b) for b in blocks)

    def _host_address(self, block: Block) -> int | None:
        return self._transitions.need_mover().host_address(block) if block.tier == "host" else None
