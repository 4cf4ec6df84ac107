"""Moves blocks of the CPU device tier to their slots and back. It knows memory and files, but no budgets."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from planner.errors import StorageError
from planner.schema import WaitingTier
from runtime.cpu.memory import CpuMemory
from runtime.device import Span
from runtime.paging import POISON, Block, BlockTransfers, Debug, Done, StorageOwnership, Tiers, dropped_message
from runtime.storage import HostStore, RangeCopy
from runtime.system import storage_swap


class CpuMover:
    """A `Mover` between main memory and the slots of lower tiers, see [Note: Pages leave, addresses stay].

    debug: see [Note: Debug mode]. Two things are different for a block that user code can see. Its pages are not poisoned,
    because another thread may be reading them; they go back to the system. And its copy is not compared, because user code
    can write to the copy through the mapping.
    ownership: shared by all movers of the process; default: one of its own.
    """

    def __init__(
        self, memory: CpuMemory, tiers: Tiers, *, debug: Debug | None = None, ownership: StorageOwnership | None = None
    ) -> None:
        self._memory = memory
        self._ownership = ownership or StorageOwnership()
        self._tiers = tiers
        self._debug = debug
        self._transfers = BlockTransfers(tiers)
        self._arrived: dict[Block, Span] = {}

    @property
    def keeps_mappings(self) -> bool:
        """Pages that user code has touched stay in memory."""
        return True

    def span(self, storage: torch.UntypedStorage) -> Span | None:
        span = self._memory.span(storage)
        return span if span is not None and self._ownership.claim(storage, self) else None

    def is_same(self, block: Block, storage: torch.UntypedStorage) -> bool:
        return storage.data_ptr() == block.address and (block.span is None or self.span(storage) == block.span)

    def maybe_replaced(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """Return all: memory that was freed may serve again at the same address."""
        return blocks

    def adopt(self, storage: torch.UntypedStorage) -> None:
        if not self._ownership.stays(storage):
            self._memory.adopt(storage)

    def leave(self, storage: torch.UntypedStorage) -> None:
        self._ownership.leave(storage)

    def trim(self, spare_bytes: int) -> None:
        self._memory.trim(spare_bytes)

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def has_room(self, block: Block, tier: WaitingTier) -> bool:
        return self._tiers.has_room(block, _span(block).length_bytes, tier)

    def copy_out(self, block: Block, tier: WaitingTier | None, done: Done) -> bool:
        span = _span(block)
        place = self._tiers.place(block, span.length_bytes, tier)
        if self._debug is not None:
            self._debug.leaves(block, _content(block))
        if block.slot is not None:
            place.threads().watch(block.slot, unchanged=block.assumed_written)
        self._transfers.write(place, block, span.address, done)
        return False

    def finished(self, block: Block) -> bool:
        return True

    def release(self, block: Block) -> None:
        if block.slot is None:
            raise StorageError(f"{block} was released without a copy; this is a bug in teraio, please report it")
        poison = POISON if self._debug is not None else None
        self._memory.map_files(_span(block), block.slot.extents, keep_pages=not block.user_visible, poison=poison)

    def discard(self, block: Block) -> None:
        if self._debug is not None:
            self._debug.drops(block, _content(block))
            ctypes.memset(_span(block).address, POISON, block.size_bytes)
        storage_swap.discard(_storage(block), dropped_message(block))

    def renew(self, block: Block, fresh: torch.UntypedStorage) -> None:
        storage = _storage(block)
        if self._debug is not None:
            self._debug.made_anew(block, _bytes_at(fresh.data_ptr(), block.size_bytes))
        storage_swap.renew(storage, fresh)
        block.address, block.span = storage.data_ptr(), self.span(storage)

    def drop_copy(self, block: Block) -> None:
        self._tiers.free(block)

    def copy_in(self, block: Block, done: Done) -> bool:
        if block.user_visible:  # user code may have written to it through the mapping, even before `invalidate_mapping`
            self._distrust(block)

        def landed(error: StorageError | None) -> None:
            try:
                if error is not None:
                    self._memory.drop_pages(self._arrived.pop(block))
            finally:
                done(error)

        self._arrived[block] = area = self._memory.take_pages(_span(block).length_bytes)
        try:
            if self._debug is not None:
                ctypes.memset(area.address, POISON, area.length_bytes)
            self._transfers.read(self._tiers.of(block), block, area.address, landed)
        except BaseException:
            self._memory.drop_pages(self._arrived.pop(block))
            raise
        return False

    def install(self, block: Block) -> None:
        self._memory.install_pages(self._arrived.pop(block), _span(block))
        if self._debug is not None:
            self._debug.arrives(block)

    def wait_resident(self, blocks: Sequence[Block]) -> None:
        """Never waits: a block is installed only after its data has arrived."""
        if self._debug is not None:
            self._debug.check(blocks, _content)

    def read_range(self, block: Block, begin_bytes: int, memory: torch.Tensor) -> RangeCopy:
        if self._debug is not None:
            memory.fill_(POISON)
        return self._transfers.read_range(self._tiers.of(block), block, begin_bytes, memory)

    def write_range(self, block: Block, begin_bytes: int, memory: torch.Tensor) -> RangeCopy:
        if self._debug is not None:
            self._debug.distrust(block)
        return self._transfers.write_range(self._tiers.of(block), block, begin_bytes, memory)

    def prioritize(self, block: Block) -> None:
        self._transfers.prioritize(block)

    def check(self) -> None:
        self._transfers.check()

    def poll(self) -> None:
        """Do nothing: transfers release their memory by themselves."""

    def invalidate_mapping(self, block: Block) -> None:
        self._memory.forget_cached(_span(block))
        self._distrust(block)

    def host_address(self, block: Block) -> int | None:
        """Return the slot's place in the slab, whose pages never leave. If it is not contiguous there, return the mapping."""
        store = self._tiers.of(block).store
        if not isinstance(store, HostStore) or block.slot is None:
            return None
        return block.slot.address or _span(block).address

    def forget(self, block: Block) -> None:
        if self._debug is not None:
            self._debug.forget(block)
        self._transfers.forget(block)
        self._ownership.give_up(block.key, self)
        self._tiers.free(block)

    def close(self) -> None:
        """Give up all storages, which must be on the device."""
        self._ownership.give_up_all(self)

    def _distrust(self, block: Block) -> None:
        """Stop checking the block's slot: user code may have written to it."""
        if block.slot is not None:
            self._tiers.of(block).threads().forget_sums(block.slot)
        if self._debug is not None:
            self._debug.distrust(block)


def _span(block: Block) -> Span:
    if block.span is None:
        raise StorageError(f"{block} cannot move; this is a bug in teraio, please report it")
    return block.span


def _storage(block: Block) -> torch.UntypedStorage:
    storage = block.storage()
    if storage is None:
        raise StorageError(f"{block} gets other memory, but nobody holds it; this is a bug in teraio, please report it")
    return storage


def _content(block: Block) -> memoryview:
    return _bytes_at(_span(block).address, block.size_bytes)


def _bytes_at(address: int, size_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * size_bytes).from_address(address))
