"""Moves blocks of the CPU device tier to their slots and back. It knows memory and files, but no budgets.

Where the options ask for `checksums` or `debug`, what comes back is checked, and what user code has written meanwhile is brought
to the slots. What follows a block through a drive is checked by the engine,
see [Note: What a checksum covers]; here is what user code may see of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from copy import copy

import torch

from planner.errors import ChecksumError, StorageError, UnsupportedError
from planner.schema import WaitingTier
from runtime.cpu.memory import CpuMemory, Touched, system_tells, touched
from runtime.device import Span
from runtime.paging import DROPPED, POISON, Block, CheckedMover, Done, Mover, Tiers, dropped_message, slot_of, span_of, storage_of
from runtime.storage import RangeCopy, Slot, cut_slot, slot_range
from runtime.system import storage_swap


class CpuMover(Mover):
    """A `Mover` between main memory and the slots of lower tiers, see [Note: Pages leave, addresses stay].

    poison: see [Note: Debug mode]. The pages of a block that user code can see are not poisoned, because another thread may be
    reading them; they go back to the system. What `tiers` has `mapped` is shared: what is written to a stand-in is in the slot.
    Threads tell when a copy has ended, and a block is installed only after its data has arrived: nothing else is waited for.
    """

    def __init__(self, memory: CpuMemory, tiers: Tiers, *, poison: bool = False) -> None:
        self.tiers = tiers
        self.memory = memory
        self._poison = poison
        self._arrived: dict[Block, Span] = {}

    def span(self, storage: torch.UntypedStorage, *, adopt: bool = False) -> Span | None:
        owners = self.tiers.ownership
        if adopt and not owners.stays(storage):
            self.memory.adopt(storage)
        span = self.memory.span(storage)
        left = owners.left_behind(storage)
        if span is not None and left is not None:
            if not adopt:
                return None
            if left.slot.file is not None:
                left.slot.file.check(left.slot.name)  # where it is mapped beyond its end, a read would end the process
            self.memory.bring_in(span)
            owners.taken(storage)
        return span if span is not None and owners.claim(storage, self.tiers) else None

    def replaced(self, blocks: Sequence[Block]) -> Sequence[Block]:
        return [block for block in blocks if (held := block.storage()) is not None and not self._is_same(block, held)]

    def _is_same(self, block: Block, storage: torch.UntypedStorage) -> bool:
        if storage.nbytes() != block.size_bytes or storage.data_ptr() != block.address:
            return False
        return block.span is None or self.span(storage) == block.span  # memory that was freed may serve again at its address

    def begin_in_file(self, slot: Slot) -> tuple[Block, torch.UntypedStorage]:
        if not system_tells():
            raise UnsupportedError(
                f"{slot.name} cannot stay in {slot.extents[0].path}: /proc/self/pagemap of this system does not tell whether "
                "your code writes to it; load the checkpoint as trained weights, or run where it tells (some containers do not)"
            )
        storage = self.memory.in_file(slot.extents[0], slot.lead_bytes, slot.content_bytes)
        block = Block(held=storage, name=slot.name, kind="parameter", user_visible=True, span=self.span(storage))
        return block, storage

    def copy_out(self, block: Block, tier: WaitingTier | None, done: Done) -> bool:
        self.tiers.write(block, tier, span_of(block).address, done)
        return False

    def release(self, block: Block) -> None:
        if block.state is DROPPED:
            # No slot could stand in for it: whoever reads it gets an error, not zeros.
            if self._poison:
                ctypes.memset(span_of(block).address, POISON, block.size_bytes)
            storage_swap.discard(storage_of(block), dropped_message(block))
            return
        self.memory.map_files(
            span_of(block),
            slot_of(block).extents,
            keep_pages=not block.user_visible,
            shared=self.tiers.mapped and slot_of(block).file is None,
            poison=POISON if self._poison else None,
        )

    def copy_in(self, block: Block, done: Done) -> bool:
        def landed(error: StorageError | None) -> None:
            try:
                if error is not None:
                    self.memory.drop_pages(self._arrived.pop(block))
            finally:
                done(error)

        self.keep_changes(block)  # user code may have written to it even before `invalidate`
        self._arrived[block] = area = self.memory.take_pages(span_of(block).length_bytes)
        try:
            if self._poison:
                ctypes.memset(area.address, POISON, area.length_bytes)
            self.tiers.read(block, area.address, landed)
        except BaseException:
            self.memory.drop_pages(self._arrived.pop(block))
            raise
        return False

    def install(self, block: Block, fresh: torch.UntypedStorage | None = None) -> None:
        if fresh is None:
            # The pages change places, and the address stays: whoever holds the storage sees the content again.
            self.memory.install_pages(self._arrived.pop(block), span_of(block))
            return
        storage = storage_of(block)
        storage_swap.install(storage, fresh)
        block.address, block.span = storage.data_ptr(), self.span(storage)

    def copy_range(self, block: Block, begin_bytes: int, memory: torch.Tensor, *, to_slot: bool) -> RangeCopy:
        if self._poison and not to_slot:
            memory.fill_(POISON)
        return self.tiers.copy_range(block, begin_bytes, memory, to_slot=to_slot).wait

    def invalidate(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.keep_changes(block)
            self.memory.forget_cached(span_of(block))

    def keep_changes(self, block: Block) -> bool:
        """If user code has written to what stands in for a block in its file, give the block a slot with what is there now.

        Returns whether it has. Waits until the slot is written. Raises StorageFullError, StorageIOError; what was written stays
        in memory then.
        """
        slot, span = slot_of(block), span_of(block)
        if slot.file is None or not any(each.written for each in touched(span.address, span.length_bytes)):
            return False
        slot.file.check(slot.name)  # where it is mapped beyond its end, a read would end the process
        self.tiers.leave_file(block, span.address)
        self.memory.map_files(span, slot_of(block).extents, keep_pages=False, shared=self.tiers.mapped)
        return True


def bytes_at(address: int, size_bytes: int, leaving: bool = False) -> memoryview:
    """Return bytes of main memory, without a copy: nothing has to be waited for, all work has been done."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address))


class CheckedCpuMover(CheckedMover):
    """A `CheckedMover` in main memory that shuts what came back different: nobody can read it until it came back as it was.

    Where slots are not `mapped` but kept apart from what user code writes, see [Note: What user code has touched].
    debug: compare whole blocks too, see [Note: Debug mode].
    """

    def __init__(self, mover: CpuMover, *, debug: bool) -> None:
        super().__init__(mover, bytes_at, debug=debug)
        self._plain = mover
        self._damaged: set[Block] = set()
        self._lost: dict[Block, ChecksumError] = {}  # user code has written to a page that had come back different
        self._updates: dict[Block, int] = {}  # of blocks in the host tier: `updates` when the sums of their slot were right

    def replaced(self, blocks: Sequence[Block]) -> Sequence[Block]:
        shut = [(b, held) for b in blocks if b in self._damaged and (held := b.storage()) is not None]
        moved = [block for block, held in shut if storage_swap.address(held) != block.address]
        return [*moved, *super().replaced([block for block in blocks if block not in self._damaged])]

    def copy_out(self, block: Block, tier: WaitingTier | None, done: Done) -> bool:
        self._updates[block] = block.updates
        return super().copy_out(block, tier, self._shutting(block, done))

    def copy_in(self, block: Block, done: Done) -> bool:
        if block.user_visible:  # user code may have written to it through the mapping, even before `invalidate`
            self._bring_changes(block)
        self._distrust_host_update(block)
        return super().copy_in(block, self._shutting(block, done))

    def install(self, block: Block, fresh: torch.UntypedStorage | None = None) -> None:
        super().install(block, fresh)
        if block in self._damaged:
            self._damaged.discard(block)
            storage_swap.reopen(storage_of(block))

    def wait_resident(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            try:
                super().wait_resident([block])
            except ChecksumError as error:
                self.shut(block, error)
                raise

    def copy_range(self, block: Block, begin_bytes: int, memory: torch.Tensor, *, to_slot: bool) -> RangeCopy:
        if not to_slot:
            self._distrust_host_update(block)
        copied = super().copy_range(block, begin_bytes, memory, to_slot=to_slot)

        def wait() -> None:
            try:
                copied()
            except ChecksumError as error:
                self.shut(block, error)
                raise

        return wait

    def invalidate(self, blocks: Iterable[Block]) -> None:
        damage: list[ChecksumError] = []
        for block in blocks:
            try:
                self._bring_changes(block)
                self._mover.invalidate([block])
            except ChecksumError as error:
                damage.append(error)
        if damage:
            raise damage[0]

    def forget(self, block: Block) -> None:
        self._damaged.discard(block)
        self._lost.pop(block, None)
        self._updates.pop(block, None)
        super().forget(block)

    def distrust(self, block: Block) -> None:
        if block.slot is not None:
            self.tiers.of(block).threads().forget_sums(block.slot)
        super().distrust(block)

    def _distrust_host_update(self, block: Block) -> None:
        """Stop checking the slot of a block that the host's processor has updated there since it was written."""
        if block.tier == "host" and self._updates.get(block) != block.updates:
            self.distrust(block)
            self._updates[block] = block.updates

    def _bring_changes(self, block: Block) -> None:
        """User code may have used what stands in for the block: check what it read, and bring what it wrote to the slot.

        Raises ChecksumError, StorageIOError; what was written stays in memory then.
        """
        if block.slot is None:
            return
        if block.slot.file is not None:
            if self._plain.keep_changes(block):
                self.written(block, 0, block.address, block.size_bytes)
            return
        if self.tiers.mapped:
            self.distrust(block)
            return
        if block in self._lost:
            raise copy(self._lost[block])
        self._distrust_host_update(block)
        span = span_of(block)
        if span.lead_bytes:  # its sums are of pages that begin with its data, and the touched ones do not
            super().distrust(block)
        for each in touched(span.address, span.length_bytes):
            self._check_touched(block, each)
            if each.written:
                self._write_touched(block, each, span.address + each.offset_bytes)

    def _check_touched(self, block: Block, pages: Touched) -> None:
        """Read pages of the slot again, and compare them: user code has read them, or has changed them in part."""
        part = slot_range(slot_of(block), pages.offset_bytes, pages.length_bytes)
        chunks = self.tiers.of(block).threads().chunk_io
        read = self._plain.memory.take_pages(pages.length_bytes)
        try:
            for chunk in cut_slot(part, pages.length_bytes):
                chunks.read_chunk(part, chunk, read.address)
            self.compare(block, pages.offset_bytes, read.address, pages.length_bytes)
        except ChecksumError as error:
            if pages.written:
                self._lost[block] = copy(error)
            self.shut(block, error)
            raise
        finally:
            self._plain.memory.drop_pages(read)

    def _write_touched(self, block: Block, pages: Touched, address: int) -> None:
        part = slot_range(slot_of(block), pages.offset_bytes, pages.length_bytes)
        for chunk in cut_slot(part, pages.length_bytes):
            self.tiers.of(block).threads().chunk_io.write_chunk(part, chunk, address)
        self.written(block, pages.offset_bytes, address, pages.length_bytes)

    def _shutting(self, block: Block, done: Done) -> Done:
        """Return what a copy calls in place of `done`: nobody may see what came back different, before anybody hears of it."""

        def ended(error: StorageError | None) -> None:
            try:
                if isinstance(error, ChecksumError):
                    self.shut(block, error)
            finally:
                done(error)

        return ended

    def shut(self, block: Block, error: ChecksumError) -> None:
        """Let nobody read a block that came back different, until it has come back as it was."""
        held = block.storage()
        if held is not None:
            self._damaged.add(block)
            storage_swap.close(held, f"{block.name} was damaged on its way: {error} (by load_state_dict with assign=True)")
