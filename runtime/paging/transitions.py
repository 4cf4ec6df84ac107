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

A block begins as dirty. One whose storage is dead is forgotten as soon as it is dirty, clean, queued, offloaded or dropped
(`forget`). Only a block with a `source` is dropped: a stage that can run again and make its content anew.
Two sets say more of a block than its state: `queued_offloads` holds those in the case "queued"; `reserved_for_host` holds blocks
that are offloading, queued or offloaded and that the host's processor will update: no prefetch begins for them before, but a
stage that needs one takes it. A stage holds a block from `pin` to `unpin`; it does not wait for the end of an offload.

[Note: Queued offloads]
A copy out that the device makes by itself (see [Note: Two kinds of time]) leaves its block OFFLOADING and queued: the pager
may take its memory at any time, which makes the device wait for the copy, not the host. It does so where room is needed at
once, and for a prefetch that nothing else can make room for; otherwise it waits until the copy has ended.

[Note: Why a block leaves]
reason       who asks                   method                      what happens to the bytes
a plan       the recorder, at a stage   Pager.offload               copied to the plan's tier; the block stays if all are full
pressure     a stage that is short      Pager.acquire, make_room    those with the furthest next use are copied (EvictionPolicy),
                                                                    or dropped where a re-run is sooner (DropChoice)
room ahead   an optimizer step, for     Pager.evict_until_free      as under pressure, but nobody waits
             its next subgroup
lending      an update by slices        Pager.lend                  copied; then read and written in the slot, slice by slice
host update  HostUpdates, for blocks    Pager.reserve_for_host,     nothing is copied for it: a block in, or on its way to, the
             that wait on the host      then Pager.lend_memory      host tier is updated there by the processor

In each case the bytes go the same way. `BlockTransitions.begin_offload` calls `Mover.copy_out`, which gets a slot from
`Tiers.place`. Then a block goes to a file, or to the host tier of the CPU, in threads: `BlockTransfers.write`, `Engine.write`,
`Link.submit`; in an I/O thread `Store.write_piece` (for files `os.pwritev`) and `BlockTransitions._copied_out`. To the host tier
of a GPU the device copies by itself: `HostCopies.queue`. `Mover.release` gives the memory back. The way in is the same with
`begin_prefetch`, `Mover.copy_in`, `read` in place of `write`, `_copied_in` and `Mover.install`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile

import torch

from planner.errors import StorageError, StorageFullError
from planner.schema import WaitingTier
from runtime.paging.account import MemoryAccount
from runtime.paging.block import DROPPED, OFFLOADED, OFFLOADING, ON_DEVICE, PREFETCHING, UPDATING, Block
from runtime.paging.block_table import BlockTable
from runtime.paging.copy_signal import CopySignal
from runtime.paging.mover import Done, Mover

_SETTLED = (ON_DEVICE, OFFLOADED, DROPPED)


class BlockTransitions:
    """Moves blocks from state to state, see [Note: States of a block]. All calls with the pager's lock held.

    copy_ended: called after each copy, which may have freed memory.
    queued_offloads: see [Note: Queued offloads]; in the order in which they were queued.
    reserved_for_host: blocks that will be lent to the host's processor; no prefetch takes them before.
    evictions: number of offloads that have begun, and of blocks that were dropped under pressure.
    """

    def __init__(
        self,
        account: MemoryAccount,
        table: BlockTable,
        signal: CopySignal,
        mover: Mover | None,
        *,
        copy_ended: Callable[[], None],
    ) -> None:
        self.queued_offloads: dict[Block, None] = {}
        self.reserved_for_host: set[Block] = set()
        self.evictions = 0
        self._account = account
        self._table = table
        self._mover = mover
        self._signal = signal
        self._copy_ended = copy_ended

    def need_mover(self) -> Mover:
        """Return the mover. Raises StorageError if there is none."""
        if self._mover is None:
            raise StorageError(
                "the model does not fit and there is nowhere to move blocks to; set the option storage to a directory"
            )
        return self._mover

    # -- a stage

    def pin(self, blocks: Sequence[Block]) -> None:
        """Hold blocks for a stage: those on the device stay there."""
        if queued := self.queued_offloads:
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

    # -- out

    def begin_offload(self, block: Block, tier: WaitingTier | None = None) -> None:
        """Begin to copy a block that is ON_DEVICE out, to `tier` if that has room; a clean one is OFFLOADED at once.

        Raises StorageFullError if no tier has room, StorageError if the copy cannot begin; the block stays then.
        """
        held = block.storage()
        if held is None:  # a copy that has just ended was the last to hold it
            self.forget(block)
            return
        self.evictions += 1
        if block.copy_is_valid:
            self._release(block)
            return
        self._account.begin_offload(block)
        try:
            done = partial(self._after_copy, block, partial(self._copied_out, block.version))
            queued = self._copy_out(block, tier, done)
            if queued:
                self.queued_offloads[block], block.copy_is_valid = None, True
        except BaseException:
            self._account.end_offload(block)
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
        if block.state is OFFLOADING and block not in self.queued_offloads:
            self._account.end_offload(block)
        elif block.state is PREFETCHING:
            self._account.end_prefetch(block)
            self._account.remove(block)

    def _copied_out(self, version: int, block: Block, error: StorageError | None) -> None:
        self._account.end_offload(block)
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

    def _release(self, block: Block) -> None:
        """Free the memory of a block that is ON_DEVICE and has a valid copy.

        The memory is freed last: that cannot be undone if what follows fails.
        """
        mover = self._mover or self.need_mover()
        self._account.remove(block)
        try:
            mover.release(block)
        except BaseException:
            self._account.add(block)
            raise

    def keep(self, block: Block) -> None:
        """If the block is a queued offload, let it stay on the device: it is needed there."""
        if block in self.queued_offloads:
            self._account.end_offload(block)
            del self.queued_offloads[block]

    def take_memory(self, block: Block) -> int:
        """Take the memory of a queued offload. Returns its bytes; 0 if a stage holds it or it was written meanwhile."""
        self.keep(block)
        if block.pins or not block.copy_is_valid:
            return 0
        before = self._account.used_bytes
        self._finish_offload(block)
        return before - self._account.used_bytes

    # -- slots of blocks on the device

    def _copy_out(self, block: Block, tier: WaitingTier | None, done: Done) -> bool:
        mover = self.need_mover()
        if tier is not None and not mover.has_room(block, tier):
            self._drop_spare_copies(block, tier)
        while True:
            try:
                return mover.copy_out(block, tier, done)
            except StorageFullError:
                if not self._drop_spare_copies(block):
                    raise

    def _drop_spare_copies(self, wanting: Block, tier: WaitingTier | None = None) -> bool:
        """Free slots of blocks on the device, in `tier` if given: those that are not valid, else those that are.

        Blocks on the device keep their slots as long as there is room. Returns whether any slot was freed.
        """
        here = [block for block in self._with_copies() if block is not wanting and tier in (None, block.tier)]
        spare = [block for block in here if not block.copy_is_valid] or here
        self._drop_copies(spare)
        return bool(spare)

    def drop_void_copies(self, tier: WaitingTier) -> None:
        """Free the slots in `tier` of blocks on the device that are not valid."""
        self._drop_copies([b for b in self._with_copies() if b.tier == tier and not b.copy_is_valid])

    def _with_copies(self) -> list[Block]:
        return [b for b in self._table if b.state is ON_DEVICE and b.slot is not None]

    def _drop_copies(self, spare: Sequence[Block]) -> None:
        mover = self.need_mover()
        mover.wait_resident(spare)  # then nothing on the device reads from their slots any more
        for block in spare:
            block.copy_is_valid = block.assumed_written = False
            mover.drop_copy(block)

    # -- in

    def begin_prefetch(self, block: Block) -> None:
        """Begin to copy a block that is OFFLOADED in. An error goes to the training thread, see `CopySignal.fail`."""
        held = block.storage()
        if held is None:
            self.forget(block)
            return
        account, mover = self._account, self._mover or self.need_mover()
        done = partial(self._after_copy, block, self._copied_in)
        account.begin_prefetch(block)
        try:
            if not mover.copy_in(block, done):
                return
            account.end_prefetch(block)  # the device copies it in by itself, before anything that it does later
            try:
                mover.install(block)
            except Exception as failure:
                account.remove(block)
                self._signal.fail(failure)
        except StorageError as failure:
            done(failure)  # not raised: this may be an I/O thread that has ended another copy
        except BaseException:
            account.end_prefetch(block)
            account.remove(block)
            raise

    def _copied_in(self, block: Block, error: StorageError | None) -> None:
        self._account.end_prefetch(block)
        try:
            if error is not None:
                raise error
            self.need_mover().install(block)
        except BaseException:
            self._account.remove(block)
            raise

    # -- dropped, and made anew

    def drop(self, block: Block) -> None:
        """Free the memory of a block that is ON_DEVICE or queued, and its slot: its source makes it anew."""
        self.keep(block)
        held = block.storage()  # its memory is freed here, not when a copy that has just ended lets go of it
        if held is None:
            self.forget(block)
            return
        if block.tier is not None:
            self._drop_copies([block])
        block.copy_is_valid = block.assumed_written = False
        self._account.remove(block, DROPPED)
        try:
            self.need_mover().discard(block)
        except BaseException:
            self._account.add(block)
            raise
        self._copy_ended()

    def renew(self, block: Block, fresh: torch.UntypedStorage) -> None:
        """Give a block that is DROPPED the memory of `fresh`, which holds its content."""
        self.write(block)
        self._account.add(block)
        try:
            self.need_mover().renew(block, fresh)
        except BaseException:
            self._account.remove(block, DROPPED)
            raise

    # -- changes in the slot

    def begin_update(self, blocks: Sequence[Block]) -> None:
        """Lend the slots of blocks that are OFFLOADED: all of them, or none if that fails."""
        for block in blocks:
            self.need_mover().invalidate_mapping(block)
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

    # -- the end

    def forget(self, block: Block) -> None:
        """Drop a block that is dead or was replaced, and free its slot; later if a copy or an update still uses it."""
        if block in self.queued_offloads:
            self.keep(block)
        if block.state not in _SETTLED or not self._table.holds(block):
            return
        account = self._account
        left, moves = account.used_bytes - (block.size_bytes if block.state is ON_DEVICE else 0), account.moves + 1
        account.here.pop(block, None)
        if self._mover is not None and block.span is not None:
            self._mover.forget(block)
        self._table.remove(block)
        account.used_bytes, account.moves = left, moves
        block.let_go()

    def sweep(self) -> None:
        """Take the memory of queued offloads whose copy has ended, and forget dead blocks."""
        if self._mover is not None:
            self._mover.poll()
        for block in list(takewhile(self._mover.finished, self.queued_offloads)) if self._mover is not None else ():
            self.take_memory(block)
        for block in self._table.dead():
            self.forget(block)

    def forget_replaced(self) -> None:
        """Forget the blocks to whose storage user code gave other memory: what is known of them is void."""
        for block in self._table.replaced():
            self.forget(block)
