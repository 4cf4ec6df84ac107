"""Queues copies of blocks for the I/O threads of their tiers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from planner.errors import ChecksumError, StorageError
from runtime.paging.block import Block
from runtime.paging.mover import Done
from runtime.paging.tiers import Tier, Tiers
from runtime.storage import slot_range
from runtime.transfer import Ready, Transfer


class BlockTransfers:
    """The transfers of the blocks of one mover: what both movers need of the engines. The pager's lock guards the calls.

    All calls return at once. A block has one transfer of its whole slot at most, and any number of ranges of its slot.

    address: where the block's bytes are, or will be, in memory. done: called in an I/O thread when the copy has ended or failed.
    ready: called in an I/O thread before bytes move, see [Note: Memory that is not ready]; None if the memory is ready.
    damaged: called in an I/O thread, before `done`, with a block of which something came back different, and with the error.
    """

    def __init__(self, tiers: Tiers, *, damaged: Callable[[Block, ChecksumError], None] = lambda block, error: None) -> None:
        self._tiers = tiers
        self._damaged = damaged
        self._transfers: dict[Block, Transfer] = {}

    def write(self, tier: Tier, block: Block, address: int, done: Done, ready: Ready | None = None) -> None:
        """Queue the copy of a block from `address` to its slot."""
        self._begin(tier.threads().write, block, address, done, ready)

    def read(self, tier: Tier, block: Block, address: int, done: Done, ready: Ready | None = None) -> None:
        """Queue the copy of a block from its slot to `address`."""
        self._begin(tier.threads().read, block, address, done, ready)

    def write_range(
        self, tier: Tier, block: Block, begin_bytes: int, memory: torch.Tensor, ready: Ready | None = None
    ) -> Transfer:
        """Queue the copy of `memory` to a range of a block's slot, from `begin_bytes` on."""
        return self._begin_range(tier.threads().write, block, begin_bytes, memory, ready)

    def read_range(
        self, tier: Tier, block: Block, begin_bytes: int, memory: torch.Tensor, ready: Ready | None = None
    ) -> Transfer:
        """Queue the copy of a range of a block's slot, from `begin_bytes` on, to `memory`."""
        return self._begin_range(tier.threads().read, block, begin_bytes, memory, ready)

    def prioritize(self, block: Block) -> None:
        """Move the copy of this block to the front of its link, if it has not begun."""
        if block in self._transfers:
            self._transfers[block].promote()

    def check(self) -> None:
        """Raise StorageIOError if a drive does not answer any more."""
        for tier in self._tiers:
            if tier.engine is not None:
                tier.engine.check()

    def forget(self, block: Block) -> None:
        """The block is gone: no copy of it is queued or running, and none will be."""
        self._transfers.pop(block, None)

    def _begin(self, submit: Callable[..., Transfer], block: Block, address: int, done: Done, ready: Ready | None) -> None:
        """Queue a copy, and keep the storage alive until it has ended, even if nobody else holds the storage."""
        storage = block.storage()
        if storage is None or block.slot is None:
            raise StorageError(f"{block} has no memory to copy; this is a bug in teraio, please report it")
        held = [storage]  # a list for each copy, not an entry for each block: `done` may begin the next copy of this block

        def ended(transfer: Transfer) -> None:
            try:
                self._note_damage(block, transfer)
                done(transfer.error)
            finally:
                held.clear()

        transfer = submit(block.slot, address, ended, ready)
        with suppress(MemoryError):  # the copy has begun; without this it goes on, but cannot be put first
            self._transfers[block] = transfer

    def _begin_range(
        self, submit: Callable[..., Transfer], block: Block, begin_bytes: int, memory: torch.Tensor, ready: Ready | None
    ) -> Transfer:
        """Queue a copy, and keep memory and storage alive until it has ended, even if the caller stops waiting for it."""
        storage = block.storage()
        if storage is None or block.slot is None:
            raise StorageError(f"{block} has no slot to copy from or to; this is a bug in teraio, please report it")
        held = [memory, storage]
        part = slot_range(block.slot, begin_bytes, memory.nbytes)

        def ended(transfer: Transfer) -> None:
            self._note_damage(block, transfer)
            held.clear()

        return submit(part, memory.data_ptr(), ended, ready)

    def _note_damage(self, block: Block, transfer: Transfer) -> None:
        if isinstance(transfer.error, ChecksumError):
            self._damaged(block, transfer.error)
