"""The states of a block, and every transition between them.

[Note: States of a block]
case         state        memory    slot     who moves it on   event                                    next case
-----------  -----------  --------  -------  ----------------  ---------------------------------------  -----------
dirty        ON_DEVICE    held      invalid  any thread        begin_offload                            offloading
             .                               any thread        begin_offload, but no copy can begin     dirty
             .                               any thread        begin_offload, the device copies         queued
clean        ON_DEVICE    held      valid    any thread        begin_offload                            offloaded
             .                               training thread   write: by a stage or by user code        dirty
             .                               any thread        its slot goes to another block           dirty
dirty,       .                               training thread   drop                                     dropped
clean,
queued
offloading   OFFLOADING   held      filling  thread of a copy  copy has ended                           offloaded
             .                               thread of a copy  copy has ended, but a stage holds it     clean
             .                               thread of a copy  copy failed, or block was written        dirty
queued       OFFLOADING   held      filling  any thread        keep: a stage or a prefetch needs it     clean
             .                               any thread        take_memory                              offloaded
             .                               any thread        take_memory, but a stage holds it        clean
             .                               any thread        take_memory, but it was written          dirty
offloaded    OFFLOADED    none      valid    any thread        begin_prefetch                           prefetching
             .                               any thread        begin_prefetch, the device copies        clean
             .                               who borrows it    begin_update                             updating
prefetching  PREFETCHING  reserved  valid    thread of a copy  copy has ended                           clean
             .                               thread of a copy  copy failed, or cannot begin             offloaded
updating     UPDATING     none      in use   who borrows it    end_update: now a new version            offloaded
dropped      DROPPED      none      none     training thread   renew: its stage has run again           dirty

A block begins as dirty; one in a file of the user as offloaded.
One whose storage is dead is forgotten as soon as it is dirty, clean, queued, offloaded or dropped
(`forget`). Only a block with a `source` is dropped: a stage that can run again and recompute its content.
Two sets of the account say more of a block than its state: `queued_offloads` holds those in the case "queued";
`reserved_for_host` holds blocks that are offloading, queued or offloaded and that the host's processor will update: no prefetch
begins for them before, but a stage that needs one takes it. A stage holds a block from `pin` to `unpin`; it does not wait for the
end of an offload.

[Note: Queued offloads]
A copy out that the device makes by itself (see [Note: Two kinds of time]) leaves its block OFFLOADING and queued: the pager
may take its memory at any time, which makes the device wait for the copy, not the host. It does so where room is needed at
once, and for a prefetch that nothing else can make room for; otherwise it waits until the copy has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from planner.errors import StorageError, StorageFullError
from planner.schema import WaitingTier
from runtime.paging.block import DROPPED, OFFLOADED, OFFLOADING, ON_DEVICE, PREFETCHING, UPDATING, Block, State
from runtime.paging.mover import in_file
from runtime.paging.state import PagerPart, PagerState
from runtime.storage import FileDiffers, Slot

_SETTLED = (ON_DEVICE, OFFLOADED, DROPPED)


class BlockTransitions(PagerPart):
    """Moves blocks from state to state and counts them, see [Note: States of a block]. All calls with the pager's lock held.

    copy_ended: called after each copy, which may have freed memory.
    """

    def __init__(self, state: PagerState, *, copy_ended: Callable[[], None]) -> None:
        super().__init__(state)
        self._queued = state.account.queued_offloads
        self._copy_ended = copy_ended

    # -- a stage

    def reserve(self, size_bytes: int) -> None:
        """The stage that begins, or runs, will allocate so much; 0: it has ended."""
        self._account.reserved_bytes = size_bytes

    def note_peak(self) -> None:
        """What counts now may be the most so far."""
        account = self._account
        total = account.used_bytes + account.reserved_bytes + account.fixed_bytes + account.external_bytes
        if total > account.peak_bytes:
            account.peak_bytes = total

    def pin(self, blocks: Sequence[Block]) -> None:
        """Hold blocks for a stage: those on the device stay there."""
        if queued := self._queued:
            for block in blocks:
                if block in queued:
                    self.keep(block)
        for block in blocks:
            block.pins += 1

    def unpin(self, blocks: Sequence[Block]) -> None:
        """Undo one `pin`."""
        for block in blocks:
            block.pins -= 1

    def write(self, block: Block) -> None:
        """The block on the device was written, or may have been: its slot is not valid any more."""
        block.version += 1
        block.copy_is_valid = block.assumed_written = False

    def assume_written(self, blocks: Sequence[Block]) -> None:
        """User code may write to those of `blocks` that have memory: their slots may not be valid any more."""
        for block in blocks:
            if block.state is ON_DEVICE or block.state is OFFLOADING:
                assumed = block.copy_is_valid or block.assumed_written
                block.version += 1
                block.copy_is_valid, block.assumed_written = False, assumed

    # -- blocks that count. State and counts change in one statement: where memory runs out, both do or none does

    def begin(self, block: Block, storage: torch.UntypedStorage) -> None:
        """A storage has become a block, which is ON_DEVICE."""
        self._add(block)
        try:
            self._table.add(block, storage)
        except BaseException:
            self._remove(block)
            raise
        if block.user_visible:  # it was there when the region began, and so was counted as external
            self._account.external_bytes = max(self._account.external_bytes - block.size_bytes, 0)

    def begin_away(self, block: Block, storage: torch.UntypedStorage, slot: Slot) -> None:
        """A new block is OFFLOADED in a file of the user, whose range `slot` is."""
        block.slot, block.tier, block.state, block.copy_is_valid = slot, "storage", OFFLOADED, True
        self._table.add(block, storage)

    def _add(self, block: Block) -> None:
        """A block is ON_DEVICE: it has become known, got memory, or keeps what was removed."""
        account = self._account
        used = account.used_bytes + block.size_bytes
        account.here[block], block.state, account.used_bytes = None, ON_DEVICE, used

    def _remove(self, block: Block, state: State = OFFLOADED) -> None:
        """The memory of a block that is ON_DEVICE leaves, or is freed; the block is in `state` now."""
        account = self._account
        used, moves = account.used_bytes - block.size_bytes, account.moves + 1
        block.state, account.used_bytes, account.moves, _ = state, used, moves, account.here.pop(block, None)

    def _end_offload(self, block: Block) -> None:
        """A block is no longer OFFLOADING but ON_DEVICE; its memory still counts, see `_remove`."""
        account = self._account
        block.state, account.offloading_bytes = ON_DEVICE, account.offloading_bytes - block.size_bytes

    def _end_prefetch(self, block: Block) -> None:
        """A block is no longer PREFETCHING but ON_DEVICE; its memory still counts, see `_remove`."""
        block.state, self._account.prefetching_blocks = ON_DEVICE, self._account.prefetching_blocks - 1

    # -- out

    def begin_offload(self, block: Block, tier: WaitingTier | None = None) -> None:
        """Begin to copy a block that is ON_DEVICE out, to `tier` if that has room; a clean one is OFFLOADED at once.

        Raises StorageFullError if no tier has room, StorageError if the copy cannot begin; the block stays then.
        """
        held = block.storage()
        if held is None:  # a copy that has just ended was the last to hold it
            self.forget(block)
            return
        account = self._account
        account.evictions += 1
        if block.copy_is_valid:
            self._release(block)
            return
        block.state, account.offloading_bytes = OFFLOADING, account.offloading_bytes + block.size_bytes
        try:
            # The version is that of now: a write that overtakes the copy makes it void.
            done = partial(self._after_copy, block, partial(self._copied_out, block.version))
            queued = self._copy_out(block, tier, done)
            if queued:
                self._queued[block], block.copy_is_valid = None, True
        except BaseException:
            self._end_offload(block)
            raise
        if queued:
            self._begin_waiting()

    def _after_copy(self, block: Block, end: Callable[[Block, StorageError | None], None], error: StorageError | None) -> None:
        """A copy has ended: call `end`, in the thread of the copy. Whatever fails there, the training thread hears of it."""
        with self._signal.lock:
            try:
                end(block, error)
            except Exception as failure:
                self._signal.fail(failure)
                self._settle(block)
            self._begin_waiting()
            self._signal.notify()

    def _begin_waiting(self) -> None:
        """Memory may be free now: begin prefetches that wait for it. The training thread hears of what fails."""
        try:
            self._copy_ended()
        except Exception as failure:
            self._signal.fail(failure)

    def _settle(self, block: Block) -> None:
        """The copy of a block has ended, but what should have followed has failed: the block stays where it was."""
        if block.state is OFFLOADING and block not in self._queued:
            self._end_offload(block)
        elif block.state is PREFETCHING:
            self._end_prefetch(block)
            self._remove(block)

    def _copied_out(self, version: int, block: Block, error: StorageError | None) -> None:
        self._end_offload(block)
        if isinstance(error, FileDiffers):  # user code has written it: the next copy out goes to a slot of its own
            block.copy_is_valid = block.assumed_written = False
            return
        if error is not None:
            raise error
        block.copy_is_valid = block.version == version
        if block.copy_is_valid and not block.pins:
            self._finish_offload(block)

    def _finish_offload(self, block: Block) -> None:
        held = block.storage()  # its memory must not be freed and used again while other pages are put in its place
        if held is None:
            return
        self._release(block)

    def _release(self, block: Block, state: State = OFFLOADED) -> None:
        """Free the memory of a block that is ON_DEVICE, and can be had again otherwise; the block is in `state` then."""
        self._remove(block, state)  # before the memory is freed, which could not be undone
        try:
            self._mover.release(block)
        except BaseException:
            self._add(block)
            raise

    def keep(self, block: Block) -> None:
        """If the block is a queued offload, let it stay on the device: it is needed there."""
        if block in self._queued:
            self._end_offload(block)
            del self._queued[block]

    def take_memory(self, block: Block) -> int:
        """Take the memory of a queued offload. Returns its bytes; 0 if a stage holds it or it was written meanwhile."""
        self.keep(block)
        if block.pins or not block.copy_is_valid:
            return 0
        before = self._account.used_bytes
        self._finish_offload(block)
        return before - self._account.used_bytes

    def take_queued(self, wanted_bytes: int) -> int:
        """Take the memory of queued offloads, those first that end first, until so many bytes are free. Returns how many are."""
        freed = 0
        while self._queued and freed < wanted_bytes:
            freed += self.take_memory(next(iter(self._queued)))
        return freed

    # -- slots of blocks on the device

    def _copy_out(self, block: Block, tier: WaitingTier | None, done: Callable[[StorageError | None], None]) -> bool:
        if tier is not None and not self._tiers.has_room(block, tier):
            self._drop_spare_copies(block, tier)
        while True:
            try:
                return self._mover.copy_out(block, tier, done)
            except StorageFullError:
                if not self._drop_spare_copies(block):
                    raise

    def _drop_spare_copies(self, wanting: Block, tier: WaitingTier | None = None) -> bool:
        """Free slots of blocks on the device, in `tier` if given. Returns whether any slot was freed."""
        # Blocks on the device keep their slots as long as there is room: one that is valid spares the next copy out.
        here = [block for block in self._with_copies() if block is not wanting and tier in (None, block.tier)]
        spare = [block for block in here if not block.copy_is_valid] or here
        self._drop_copies(spare)
        return bool(spare)

    def drop_void_copies(self, tier: WaitingTier) -> None:
        """Free the slots in `tier` of blocks on the device that are not valid."""
        self._drop_copies([b for b in self._with_copies() if b.tier == tier and not b.copy_is_valid])

    def _with_copies(self) -> list[Block]:
        return [b for b in self._table if b.state is ON_DEVICE and b.slot is not None and not in_file(b)]  # those take no room

    def _drop_copies(self, spare: Sequence[Block]) -> None:
        # Nothing on the device may read from a slot that others get. Computation waits for those reads, and later copies out
        # wait for computation (rules 1 and 3).
        self._mover.wait_resident(spare)
        for block in spare:
            block.copy_is_valid = block.assumed_written = False
            self._tiers.free(block)

    # -- in

    def begin_prefetch(self, block: Block) -> None:
        """Begin to copy a block that is OFFLOADED in. An error goes to the training thread, see `CopySignal.fail`."""
        held = block.storage()
        if held is None:
            self.forget(block)
            return
        account = self._account
        done = partial(self._after_copy, block, self._copied_in)
        account.here[block] = None
        used, blocks, moves = account.used_bytes + block.size_bytes, account.prefetching_blocks + 1, account.moves + 1
        block.state, account.used_bytes, account.prefetching_blocks, account.moves = PREFETCHING, used, blocks, moves
        try:
            self.note_peak()
            if not self._mover.copy_in(block, done):
                return
            self._end_prefetch(block)  # the device copies it in by itself, before anything that it does later
            try:
                self._mover.install(block)
            except Exception as failure:
                self._remove(block)
                self._signal.fail(failure)
        except StorageError as failure:
            done(failure)  # not raised: this may be an I/O thread that has ended another copy
        except BaseException:
            self._end_prefetch(block)
            self._remove(block)
            raise

    def _copied_in(self, block: Block, error: StorageError | None) -> None:
        self._end_prefetch(block)
        try:
            if error is not None:
                raise error
            self._mover.install(block)
        except BaseException:
            self._remove(block)
            raise

    # -- dropped, and recomputed

    def drop(self, block: Block) -> None:
        """Free the memory of a block that is ON_DEVICE or queued, and its slot: its source recomputes it."""
        self.keep(block)
        held = block.storage()  # its memory is freed here, not when a copy that has just ended lets go of it
        if held is None:
            self.forget(block)
            return
        if block.tier is not None:
            self._drop_copies([block])
        block.copy_is_valid = block.assumed_written = False
        self._release(block, DROPPED)
        self._copy_ended()

    def renew(self, block: Block, fresh: torch.UntypedStorage) -> None:
        """Give a block that is DROPPED the memory of `fresh`, which holds its content."""
        self.write(block)
        self._add(block)
        try:
            self._mover.install(block, fresh)
        except BaseException:
            self._remove(block, DROPPED)
            raise

    # -- changes in the slot

    def begin_update(self, blocks: Sequence[Block]) -> None:
        """Lend the slots of blocks that are OFFLOADED: all of them, or none if that fails."""
        self._mover.invalidate(blocks)
        for block in blocks:
            self._account.here[block] = None
        for block in blocks:
            block.state = UPDATING

    def end_update(self, blocks: Sequence[Block]) -> None:
        """Those of `blocks` that are UPDATING hold what is in their slots now."""
        for block in blocks:
            if block.state is UPDATING:
                version, updates = block.version + 1, block.updates + 1
                block.version, block.updates, block.state = version, updates, OFFLOADED
                self._account.here.pop(block, None)

    def reserve_for_host(self, blocks: Sequence[Block]) -> None:
        """No prefetch takes these blocks until `end_reservation`."""
        self._account.reserved_for_host |= set(blocks)

    def end_reservation(self, blocks: Sequence[Block]) -> None:
        """Undo `reserve_for_host`, and begin the prefetches that have waited. The training thread hears of errors."""
        self._account.reserved_for_host.difference_update(blocks)
        self._begin_waiting()

    # -- the end

    def forget(self, block: Block) -> None:
        """Drop a block that is dead or was replaced, and free its slot; later if a copy or an update still uses it."""
        self.keep(block)
        if block.state not in _SETTLED or not self._table.holds(block):
            return
        account = self._account
        left, moves = account.used_bytes - (block.size_bytes if block.state is ON_DEVICE else 0), account.moves + 1
        account.here.pop(block, None)
        if block.span is not None:
            self._mover.forget(block)
        self._table.remove(block)
        account.used_bytes, account.moves = left, moves
        block.let_go()

    def sweep(self) -> None:
        """Take the memory of queued offloads whose copy has ended, and forget dead blocks."""
        for block in self._mover.finished(self._queued):
            self.take_memory(block)
        for block in self._table.dead():
            self.forget(block)

    def forget_replaced(self, blocks: Iterable[Block] | None = None) -> None:
        """Forget those of `blocks`, by default all, to whose storage user code gave other memory (`share_memory_`, `resize_`):
        nothing is known of it."""
        looked_at = self._table if blocks is None else blocks
        for block in self._mover.replaced([each for each in looked_at if each.user_visible and each.state is not DROPPED]):
            self.forget(block)


class MovingPart(PagerPart):
    """What lets blocks go from state to state, for its own reasons."""

    def __init__(self, state: PagerState, transitions: BlockTransitions) -> None:
        super().__init__(state)
        self._transitions = transitions
