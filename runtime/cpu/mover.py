"""Moves blocks of the CPU device tier to their slots and back. It knows memory and files, but no budgets."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from planner.errors import StorageError
from planner.schema import WaitingTier
from runtime.cpu.memory import CpuMemory
from runtime.device import Span
from runtime.paging import DROPPED, POISON, Block, Done, Tiers, dropped_message, slot_of, span_of, storage_of
from runtime.storage import RangeCopy
from runtime.system import storage_swap


class CpuMover:
    """A `Mover` between main memory and the slots of lower tiers, see [Note: Pages leave, addresses stay].

    poison: see [Note: Debug mode]. The pages of a block that user code can see are not poisoned, because another thread may be
    reading them; they go back to the system. What `tiers` has `mapped` is shared: what is written to a stand-in is in the slot.
    """

    def __init__(self, memory: CpuMemory, tiers: Tiers, *, poison: bool = False) -> None:
        self.tiers = tiers
        self._memory = memory
        self._poison = poison
        self._arrived: dict[Block, Span] = {}

    def span(self, storage: torch.UntypedStorage, *, adopt: bool = False) -> Span | None:
        owners = self.tiers.ownership
        if adopt and not owners.stays(storage):
            self._memory.adopt(storage)
        span = self._memory.span(storage)
        return span if span is not None and owners.claim(storage, self.tiers) else None

    def replaced(self, blocks: Sequence[Block]) -> Sequence[Block]:
        return [block for block in blocks if (held := block.storage()) is not None and not self._is_same(block, held)]

    def _is_same(self, block: Block, storage: torch.UntypedStorage) -> bool:
        if storage.nbytes() != block.size_bytes or storage.data_ptr() != block.address:
            return False
        return block.span is None or self.span(storage) == block.span  # memory that was freed may serve again at its address

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copy_out(self, block: Block, tier: WaitingTier | None, done: Done) -> bool:
        self.tiers.place(block, tier)
        self.tiers.write(block, span_of(block).address, done)
        return False

    def finished(self, blocks: Iterable[Block]) -> list[Block]:
        """Return all: threads tell when a copy has ended, and their transfers free memory by themselves."""
        return list(blocks)

    def release(self, block: Block) -> None:
        if block.state is DROPPED:
            if self._poison:
                ctypes.memset(span_of(block).address, POISON, block.size_bytes)
            storage_swap.discard(storage_of(block), dropped_message(block))
            return
        self._memory.map_files(
            span_of(block),
            slot_of(block).extents,
            keep_pages=not block.user_visible,
            shared=self.tiers.mapped,
            poison=POISON if self._poison else None,
        )

    def copy_in(self, block: Block, done: Done) -> bool:
        def landed(error: StorageError | None) -> None:
            try:
                if error is not None:
                    self._memory.drop_pages(self._arrived.pop(block))
            finally:
                done(error)

        self._arrived[block] = area = self._memory.take_pages(span_of(block).length_bytes)
        try:
            if self._poison:
                ctypes.memset(area.address, POISON, area.length_bytes)
            self.tiers.read(block, area.address, landed)
        except BaseException:
            self._memory.drop_pages(self._arrived.pop(block))
            raise
        return False

    def install(self, block: Block, fresh: torch.UntypedStorage | None = None) -> None:
        if fresh is None:
            self._memory.install_pages(self._arrived.pop(block), span_of(block))
            return
        storage = storage_of(block)
        storage_swap.renew(storage, fresh)
        block.address, block.span = storage.data_ptr(), self.span(storage)

    def wait_resident(self, blocks: Sequence[Block]) -> None:
        """Never waits: a block is installed only after its data has arrived."""

    def copy_range(self, block: Block, begin_bytes: int, memory: torch.Tensor, *, to_slot: bool) -> RangeCopy:
        if self._poison and not to_slot:
            memory.fill_(POISON)
        return self.tiers.copy_range(block, begin_bytes, memory, to_slot=to_slot)

    def invalidate(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._memory.forget_cached(span_of(block))

    def forget(self, block: Block) -> None:
        self.tiers.forget(block)


def bytes_at(address: int, size_bytes: int, leaving: bool = False) -> memoryview:
    """Return bytes of main memory, without a copy: nothing has to be waited for, all work has been done."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address))
