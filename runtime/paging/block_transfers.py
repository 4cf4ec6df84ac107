"""Hands copies of blocks to the I/O threads of their tiers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from planner.errors import StorageError
from runtime.paging.block import Block
from runtime.paging.mover import Done
from runtime.paging.tiers import Tier, Tiers
from runtime.storage import slot_range
from runtime.transfer import Ready, Transfer


class BlockTransfers:
    """The transfers of the blocks of one mover. The pager's lock guards the calls.

    ready: see `runtime.transfer.link`: called in an I/O thread before bytes move.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
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
        """Queue the copy of `memory` to a part of a block's slot. Any number of them may be under way."""
        return self._begin_range(tier.threads().write, block, begin_bytes, memory, ready)

    def read_range(
        self, tier: Tier, block: Block, begin_bytes: int, memory: torch.Tensor, ready: Ready | None = None
    ) -> Transfer:
        """Queue the copy of a part of a block's slot to `memory`. Any number of them may be under way."""
        return self._begin_range(tier.threads().read, block, begin_bytes, memory, ready)

    def prioritize(self, block: Block) -> None:
        """A copy of this block that has not begun goes to the front of its link."""
        if block in self._transfers:
            self._transfers[block].promote()

    def check(self) -> None:
        """Raises StorageIOError if a drive does not answer any more."""
        for tier in self._tiers:
            if tier.engine is not None:
                tier.engine.check()

    def forget(self, block: Block) -> None:
        """No copy of this block is under way, and none will be."""
        self._transfers.pop(block, None)

    def _begin(self, submit: Callable[..., Transfer], block: Block, address: int, done: Done, ready: Ready | None) -> None:
        """The storage stays alive until its copy has ended, also if everyone else lets go of it."""
        storage = block.storage()
        if storage is None or block.slot is None:
            raise StorageError(f"{block} has no memory to copy; this is a bug in teraio, please report it")
        held = [storage]  # not one entry for each block: `done` may begin the next copy of this one

        def ended(transfer: Transfer) -> None:
            try:
                done(transfer.error)
            finally:
                held.clear()

        self._transfers[block] = submit(block.slot, address, ended, ready)

    def _begin_range(
        self, submit: Callable[..., Transfer], block: Block, begin_bytes: int, memory: torch.Tensor, ready: Ready | None
    ) -> Transfer:
        """Memory and storage stay alive until the copy has ended, also if who waits for it gives up."""
        storage = block.storage()
        if storage is None or block.slot is None:
            raise StorageError(f"{block} has no slot to copy from or to; this is a bug in teraio, please report it")
        held = [memory, storage]
        part = slot_range(block.slot, begin_bytes, memory.nbytes)
        return submit(part, memory.data_ptr(), lambda _: held.clear(), ready)
