"""Moves blocks of the CPU device tier to their slots and back. It knows memory and files, but no budgets."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy

import torch

from planner.errors import ChecksumError, StorageError
from planner.schema import WaitingTier
from runtime.cpu.memory import CpuMemory, touched
from runtime.device import Span
from runtime.paging import POISON, Block, BlockTransfers, Debug, Done, StorageOwnership, Tiers, dropped_message
from runtime.storage import HostStore, RangeCopy, cut_slot, slot_range
from runtime.system import storage_swap


class CpuMover:
    """A `Mover` between main memory and the slots of lower tiers, see [Note: Pages leave, addresses stay].

    debug: see [Note: Debug mode]. The pages of a block that user code can see are not poisoned, because another thread may be
    reading them; they go back to the system.
    keep_slots: user code writes to memory of its own, not to slots, see [Note: What user code has touched].
    ownership: shared by all movers of the process; default: one of its own.
    """

    def __init__(
        self,
        memory: CpuMemory,
        tiers: Tiers,
        *,
        debug: Debug | None = None,
        keep_slots: bool = False,
        ownership: StorageOwnership | None = None,
    ) -> None:
        self._memory = memory
        self._ownership = ownership or StorageOwnership()
        self._tiers = tiers
        self._debug = debug
        self._keeps_slots = keep_slots
        self._transfers = BlockTransfers(tiers, damaged=self._shut)
        self._damaged: set[Block] = set()
        self._lost: dict[Block, ChecksumError] = {}  # user code has written to a page that had come back different
        self._updates: dict[Block, int] = {}  # of blocks in the host tier: `updates` when the sums of their slot were right
        self._arrived: dict[Block, Span] = {}

    @property
    def keeps_mappings(self) -> bool:
        """Pages that user code has touched stay in memory."""
        return True

    def span(self, storage: torch.UntypedStorage) -> Span | None:
        span = self._memory.span(storage)
        return span if span is not None and self._ownership.claim(storage, self) else None

    def is_same(self, block: Block, storage: torch.UntypedStorage) -> bool:
        if block in self._damaged:
            return storage_swap.address(storage) == block.address
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
        self._updates[block] = block.updates
        self._transfers.write(place, block, span.address, done)
        return False

    def finished(self, block: Block) -> bool:
        return True

    def release(self, block: Block) -> None:
        if block.slot is None:
            raise StorageError(f"{block} was released without a copy; this is a bug in teraio, please report it")
        poison = POISON if self._debug is not None else None
        self._memory.map_files(
            _span(block),
            block.slot.extents,
            keep_pages=not block.user_visible,
            shared=not self._keeps_slots,
            poison=poison,
        )

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
            self._mapping_changed(block)
        self._distrust_host_update(block)

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
        if block in self._damaged:
            self._damaged.discard(block)
            storage_swap.reopen(_storage(block))
        if self._debug is not None:
            self._debug.arrives(block)

    def wait_resident(self, blocks: Sequence[Block]) -> None:
        """Never waits: a block is installed only after its data has arrived."""
        if self._debug is None:
            return
        for block in blocks:
            try:
                self._debug.check([block], _content)
            except ChecksumError as error:
                self._shut(block, error)
                raise

    def read_range(self, block: Block, begin_bytes: int, memory: torch.Tensor) -> RangeCopy:
        self._distrust_host_update(block)
        if self._debug is not None:
            memory.fill_(POISON)
        return self._transfers.read_range(self._tiers.of(block), block, begin_bytes, memory)

    def write_range(self, block: Block, begin_bytes: int, memory: torch.Tensor) -> RangeCopy:
        if self._debug is not None:
            self._debug.written(block, begin_bytes, memory.data_ptr(), memory.nbytes)
        return self._transfers.write_range(self._tiers.of(block), block, begin_bytes, memory)

    def prioritize(self, block: Block) -> None:
        self._transfers.prioritize(block)

    def check(self) -> None:
        self._transfers.check()

    def poll(self) -> None:
        """Do nothing: transfers release their memory by themselves."""

    def invalidate_mapping(self, block: Block) -> None:
        self._mapping_changed(block)
        self._memory.forget_cached(_span(block))

    def host_address(self, block: Block) -> int | None:
        """Return the slot's place in the slab, whose pages never leave. If it is not contiguous there, return the mapping."""
        store = self._tiers.of(block).store
        if not isinstance(store, HostStore) or block.slot is None:
            return None
        return block.slot.address or (None if self._keeps_slots else _span(block).address)

    def forget(self, block: Block) -> None:
        if self._debug is not None:
            self._debug.forget(block)
        self._damaged.discard(block)
        self._lost.pop(block, None)
        self._updates.pop(block, None)
        self._transfers.forget(block)
        self._ownership.give_up(block.key, self)
        self._tiers.free(block)

    def close(self) -> None:
        """Give up all storages, which must be on the device."""
        self._ownership.give_up_all(self)

    def _mapping_changed(self, block: Block) -> None:
        """User code may have used what stands in for the block: check what it read, and bring what it wrote to the slot.

        Raises ChecksumError, StorageIOError; what was written stays in memory then.
        """
        if block.slot is None:
            return
        if not self._keeps_slots:
            self._distrust(block)
            return
        if block in self._lost:
            raise copy(self._lost[block])
        self._distrust_host_update(block)
        span, chunks = _span(block), self._tiers.of(block).threads().chunk_io
        for each in touched(span.address, span.length_bytes):
            part = slot_range(block.slot, each.offset_bytes, each.length_bytes)
            read = self._memory.take_pages(each.length_bytes)
            try:
                for chunk in cut_slot(part, each.length_bytes):
                    chunks.read_chunk(part, chunk, read.address)
                if self._debug is not None:
                    self._debug.compare(block, each.offset_bytes, read.address, each.length_bytes)
            except ChecksumError as error:
                if each.written:
                    self._lost[block] = copy(error)
                self._shut(block, error)
                raise
            finally:
                self._memory.drop_pages(read)
            if each.written:
                own = span.address + each.offset_bytes
                for chunk in cut_slot(part, each.length_bytes):
                    chunks.write_chunk(part, chunk, own)
                if self._debug is not None:
                    self._debug.written(block, each.offset_bytes, own, each.length_bytes)

    def _distrust_host_update(self, block: Block) -> None:
        """Stop checking the slot of a block that the host's processor has updated there since it was written."""
        if block.tier == "host" and self._updates.get(block) != block.updates:
            self._distrust(block)
            self._updates[block] = block.updates

    def _distrust(self, block: Block) -> None:
        if block.slot is not None:
            self._tiers.of(block).threads().forget_sums(block.slot)
        if self._debug is not None:
            self._debug.distrust(block)

    def _shut(self, block: Block, error: ChecksumError) -> None:
        """Let nobody read a block that came back different, until it has come back as it was."""
        held = block.storage()
        if held is not None:
            self._damaged.add(block)
            storage_swap.close(held, f"{block.name} was damaged on its way: {error} (by load_state_dict with assign=True)")


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
