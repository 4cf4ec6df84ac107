"""What the pager needs of a device and of the tiers below it: copies of blocks there and back, and the slots that they go to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Protocol

import torch

from planner.errors import StorageError, StorageFullError, UnsupportedError
from planner.schema import WaitingTier
from runtime.device import Span
from runtime.paging.block import Block, StorageOwnership
from runtime.storage import FileSpace, RangeCopy, Slot, Store, cut_slot, map_slot, slot_range
from runtime.system import storage_swap
from runtime.transfer import Engine, Ready, Transfer

_WRITTEN_BYTES = 8 << 20  # a block that leaves its file is written in pieces of this size

# Called once, in any thread, when a copy that threads make has ended; with its error if it failed.
Done = Callable[[StorageError | None], None]


def nowhere() -> StorageError:
    """Return the error of a block that has to leave where there is no lower tier."""
    return StorageError("the model does not fit and there is nowhere to move blocks to; set the option storage to a directory")


class Mover(Protocol):
    """Copies blocks between the device and the tiers below. The pager's lock guards the calls.

    `copy_out` and `copy_in` return at once; the other calls are short. The bodies here are for
    where there is no lower tier, or threads make all copies.

    tiers: those below the device: slots, and the threads that copy.
    together: a context for copies that the training thread lets begin together: the device computes nothing new meanwhile.

    [Note: Two kinds of time]
    A copy that threads make has ended when its `Done` is called. A copy that the device makes by itself, in the order of its
    queues, is only queued when `copy_out` or `copy_in` returns True, and there is no `Done`. `finished` returns whether it has
    ended. Whoever needs its result makes the device wait for it, not the host: `wait_resident` for copies in, `release` for
    copies out.
    """

    tiers: Tiers
    together: AbstractContextManager[object] = nullcontext()

    def span(self, storage: torch.UntypedStorage, *, adopt: bool = False) -> Span | None:
        """Return the part of `storage` that can leave the device; None if the storage has to stay.

        adopt: move its data to memory that it can leave from, unless it is there or must stay where it is. Waits for that. So
        comes in what an earlier run has left in its tiers; without that, it has to stay.
        """
        return None

    def replaced(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """Return those of `blocks` whose storages have other memory or size than the block was last seen with, or moved to."""
        known = [(block, held) for block in blocks if (held := block.storage()) is not None]
        return [b for b, held in known if held.nbytes() != b.size_bytes or held.data_ptr() != b.address]

    def begin_in_file(self, slot: Slot) -> tuple[Block, torch.UntypedStorage]:
        """Return a new parameter with the name and the size of `slot`, which is in a file of the user and stands in for it, and
        its storage, which takes no memory. The caller gives the block its slot. Raises UnsupportedError, StorageError.
        """
        raise nowhere()

    def copy_out(self, block: Block, tier: WaitingTier | None, done: Done) -> bool:
        """Begin to copy a block to a slot in `tier`; in the first tier with room if `tier` is full or None.

        Returns whether the device makes the copy by itself. Raises StorageFullError if no tier has room, StorageError if the copy
        cannot begin.
        """
        raise nowhere()

    def copy_in(self, block: Block, done: Done) -> bool:
        """Begin to copy a block from its slot into new memory. `install` gives that memory to the block's storage.

        Returns whether the device makes the copy by itself. Raises StorageError if the copy cannot begin.
        """
        raise nowhere()

    def finished(self, blocks: Iterable[Block]) -> list[Block]:
        """Return `blocks` up to the first one from or to whose slot the device still copies. Copies out end in the order in which
        they began. Frees what copies needed that have ended meanwhile. Never waits.
        """
        return list(blocks)

    def release(self, block: Block) -> None:
        """Free the memory of a block. From now on its slot, which is valid, stands in for it.

        A block that is DROPPED has no slot: its content is gone, and whoever accesses it gets an error.
        """
        raise nowhere()

    def install(self, block: Block, fresh: torch.UntypedStorage | None = None) -> None:
        """Give the block's storage the memory that `copy_in` fills; or that of `fresh`, a storage of its size that ends here, and
        has its content. What it had is freed, after its copies."""
        raise nowhere()

    def wait_resident(self, blocks: Sequence[Block]) -> None:
        """Make what the device does from now on wait until the copies in of these blocks have ended.

        In the debug mode the host waits too. Raises ChecksumError there if a block is not what it was when it left.
        """
        return

    def copy_range(self, block: Block, begin_bytes: int, memory: torch.Tensor, *, to_slot: bool) -> RangeCopy:
        """Begin to copy between `memory`, a tensor of bytes on the device, and a range of a lent slot, from `begin_bytes` on.

        Begins after all computation that was queued so far. Address and size of `memory` and `begin_bytes` are multiples of
        ALIGNMENT_BYTES. Bytes beyond the slot's end are not copied. The caller owns the memory, and must not touch it before it
        has waited for the copy. The mover keeps it alive until then. Raises StorageError if the copy cannot begin.
        """
        raise nowhere()

    def invalidate(self, blocks: Iterable[Block]) -> None:
        """The slots of blocks that are away may be changed, or were: by user code through what stands in for them, or by the
        host's processor. Drop what is cached or known of their content. Raises ChecksumError after the last one."""
        return

    def forget(self, block: Block) -> None:
        """The block is gone: free its slot."""
        self.tiers.forget(block)


def dropped_message(block: Block) -> str:
    """Say what whoever accesses a dropped block has to do."""
    return (
        f"{block.name} ({block.kind}, {block.size_bytes:,} bytes) is not in memory: teraio has dropped it, to make it anew when "
        "the backward pass needs it. If your code reads it before, set the option recompute='off'"
    )


def _left_away(block: Block) -> str:
    return (
        f"{block.name} ({block.kind}, {block.size_bytes:,} bytes) is not in memory: when teraio's run ended, neither the device "
        f"nor the host tier had room, and it stayed in {block.tier}. Compile the model again to train on, or give a host_budget "
        "that holds it"
    )


class NullMover(Mover):
    """A `Mover` where there is nowhere to move blocks to: all stay."""

    def __init__(self) -> None:
        self.tiers = Tiers(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One tier. store: its slots. engine: the I/O threads that copy; None where the device copies by itself."""

    store: Store
    engine: Engine | None

    @property
    def name(self) -> WaitingTier:
        return self.store.tier

    def threads(self) -> Engine:
        """Return the engine. Raises StorageError for a tier without one."""
        if self.engine is None:
            raise StorageError(f"the tier {self.name} has no threads; this is a bug in teraio, please report it")
        return self.engine


class Tiers:
    """All tiers below the device, the fastest first: the slots of blocks, and the copies that I/O threads make.

    The pager's lock guards the calls, which return at once. A block has one transfer of its whole slot at most, and any number of
    ranges of its slot.

    ownership: of the storages that may have slots here; shared by all tiers of the process; default: one of its own.
    mapped: what stands in for a block that is away is its slot, mapped over the block's memory.
    """

    def __init__(self, tiers: Sequence[Tier], *, ownership: StorageOwnership | None = None, mapped: bool = False) -> None:
        self.ownership = ownership or StorageOwnership()
        self.mapped = mapped
        self._tiers = {tier.name: tier for tier in tiers}
        self._transfers: dict[Block, Transfer] = {}

    def __iter__(self) -> Iterator[Tier]:
        return iter(self._tiers.values())

    def __len__(self) -> int:
        return len(self._tiers)

    # -- slots

    def of(self, block: Block) -> Tier:
        """Return the tier that the block has its slot in. Raises StorageError if it has none."""
        if block.tier is None:
            raise StorageError(f"{block} has no slot; this is a bug in teraio, please report it")
        return self._tiers[block.tier]

    def place(self, block: Block, wanted: WaitingTier | None) -> Tier:
        """Give the block a slot in the tier `wanted`, else in the first tier with room. A slot that the block has, it keeps
        unless another tier is wanted that has room; one in a file of the user, as long as only user code may have written the
        block. Returns the tier.

        Raises StorageFullError if no tier has room.
        """
        keeps, before = wanted in (None, block.tier), block.tier
        if in_file(block):
            keeps, before = block.assumed_written, None
        if block.tier is not None and keeps:
            return self._tiers[block.tier]
        order = sorted(self._tiers.values(), key=lambda tier: tier.name != wanted)
        better = list(takewhile(lambda tier: tier.name != before, order))
        try:
            tier, slot = self._allocate(block, better)
        except StorageFullError:
            if before is None:
                raise
            return self._tiers[before]
        self._exchange(block, tier, slot)
        return tier

    def _allocate(self, block: Block, tiers: Sequence[Tier]) -> tuple[Tier, Slot]:
        """Return a slot in the first of `tiers` with room. Raises StorageFullError if none has."""
        full: StorageFullError | None = None
        try:
            for tier in tiers:
                try:
                    return tier, tier.store.allocate(span_of(block).length_bytes, block.name)
                except StorageFullError as error:
                    full = full or error
            raise full or StorageFullError(
                f"there is no tier for block {block.name!r}; this is a bug in teraio, please report it"
            )
        finally:
            full = None  # its traceback holds this frame, and that all callers' frames with the tensors in them

    def _exchange(self, block: Block, tier: Tier, slot: Slot) -> None:
        """Give a block another slot, and free the one that it has."""
        try:
            self.free(block)
        except BaseException:
            tier.store.release(slot)
            raise
        block.slot, block.tier = slot, tier.name

    # -- slots in files of the user, see [Note: Blocks in files]

    def slot_in_file(self, name: str, path: Path, offset_bytes: int, size_bytes: int) -> Slot:
        """Return a slot in the storage tier that is a range of a file of the user. Reads none of it.

        Raises UnsupportedError without a storage tier, StorageIOError if the file cannot be used.
        """
        tier = self._tiers.get("storage")
        if tier is None or not isinstance(tier.store, FileSpace):
            raise UnsupportedError(
                f"{name} cannot stay in {path}: there is no storage tier, whose threads would read it; give the option storage"
            )
        slot = tier.store.slot_in_file(name, path, offset_bytes, size_bytes)
        tier.threads().serve(slot)
        return slot

    def release_in_file(self, slot: Slot) -> None:
        """End a slot of `slot_in_file` that no block has got."""
        self._tiers["storage"].store.release(slot)

    def leave_file(self, block: Block, address: int) -> None:
        """Give a block in a file of the user a slot of its own with the bytes at `address`. Waits until they are written.

        Raises StorageFullError, StorageIOError; then the block is as it was.
        """
        tier, slot = self._allocate(block, list(self))
        try:
            for chunk in cut_slot(slot, _WRITTEN_BYTES):
                tier.threads().chunk_io.write_chunk(slot, chunk, address)
        except BaseException:
            tier.store.release(slot)
            raise
        self._exchange(block, tier, slot)

    def check_files(self) -> None:
        """Raise StorageIOError if a file of the user has changed whose bytes blocks have as theirs. Reads none of them."""
        for tier in self:
            if isinstance(tier.store, FileSpace):
                tier.store.user_files.check()

    def has_room(self, block: Block, wanted: WaitingTier) -> bool:
        """Whether the block has a slot in the tier, or could get one."""
        if wanted not in self._tiers or block.tier == wanted and not in_file(block):
            return block.tier == wanted
        store = self._tiers[wanted].store
        return store.limit_bytes - store.used_bytes >= span_of(block).length_bytes

    def host_address(self, block: Block) -> int | None:
        """Return where the host's processor can read and write the slot of a block that is away.

        None if the slot is not in the host tier, or not in one piece.
        """
        if block.tier != "host" or block.slot is None:
            return None
        if (address := block.slot.address) is not None:
            return address + span_of(block).lead_bytes
        return block.address if self.mapped else None

    def free(self, block: Block) -> None:
        """Free the block's slot, if it has one. A copy in of it has ended, or the device will wait for it before others write."""
        if block.slot is not None:
            self.of(block).store.release(block.slot)
            block.slot = block.tier = None

    def map(self, block: Block) -> torch.UntypedStorage:
        """Return a storage in main memory over the slot of a block that is away: one for all who ask while it lives.

        The slot is given to no other block meanwhile. What is written to the storage does not reach the slot.
        """
        return map_slot(self.of(block).store, slot_of(block), _lead_bytes(block), block.size_bytes)

    def leave_behind(self, block: Block) -> None:
        """The run ends, and the block is away: leave its slot to its storage, see `StorageOwnership.leave_behind`."""
        store, slot, storage = self.of(block).store, slot_of(block), storage_of(block)
        if not storage_swap.address(storage):  # nothing stands in for it
            storage_swap.close(storage, _left_away(block))
        self.ownership.leave_behind(storage, store, slot, _lead_bytes(block))
        block.slot = block.tier = None

    def forget(self, block: Block) -> None:
        """The block is gone: no copy of it is queued or running, and none will be. Free its slot and give its storage up."""
        self._transfers.pop(block, None)
        self.ownership.give_up(block.key, self)
        self.free(block)

    def close(self) -> None:
        """Give up all storages, which must be on the device or left behind."""
        self.ownership.give_up_all(self)

    # -- copies by threads

    def write(self, block: Block, tier: WaitingTier | None, address: int, done: Done, ready: Ready | None = None) -> None:
        """Give the block a slot, see `place`, and queue its copy from `address` to it.

        done: called in an I/O thread when the copy has ended or failed. ready: called in an I/O thread before bytes move, see
        [Note: Memory that is not ready]; None if the memory is ready.
        """
        engine, slot = self.place(block, tier).threads(), slot_of(block)
        engine.watch(slot, unchanged=block.assumed_written)
        self._begin(engine.write, slot, block, address, done, ready)

    def read(self, block: Block, address: int, done: Done, ready: Ready | None = None) -> None:
        """Queue the copy of a block from its slot to `address`. done, ready: see `write`."""
        self._begin(self.of(block).threads().read, slot_of(block), block, address, done, ready)

    def copy_range(
        self, block: Block, begin_bytes: int, memory: torch.Tensor, ready: Ready | None = None, *, to_slot: bool
    ) -> Transfer:
        """Queue a copy between `memory` and a range of a block's slot, from `begin_bytes` on.

        Keeps memory and storage alive until the copy has ended, even if the caller stops waiting for it.
        """
        engine, held = self.of(block).threads(), [memory, storage_of(block)]
        part = slot_range(slot_of(block), begin_bytes, memory.nbytes)
        submit = engine.write if to_slot else engine.read
        return submit(part, memory.data_ptr(), lambda transfer: held.clear(), ready)

    def prioritize(self, block: Block) -> None:
        """Move the copy of this block to the front of its link, if it has not begun."""
        if block in self._transfers:
            self._transfers[block].promote()

    def check(self) -> None:
        """Raise StorageIOError if a copy has made no progress for too long: its drive does not answer any more."""
        for tier in self:
            if tier.engine is not None:
                tier.engine.check()

    def _begin(
        self, submit: Callable[..., Transfer], slot: Slot, block: Block, address: int, done: Done, ready: Ready | None
    ) -> None:
        """Queue a copy, and keep the storage alive until it has ended, even if nobody else holds the storage."""
        held = [storage_of(block)]  # a list for each copy, since `done` may begin the next copy of this block

        def ended(transfer: Transfer) -> None:
            try:
                done(transfer.error)
            finally:
                held.clear()

        transfer = submit(slot, address, ended, ready)
        with suppress(MemoryError):  # the copy has begun; without this it goes on, but cannot be put first
            self._transfers[block] = transfer


def span_of(block: Block) -> Span:
    """Return the block's span. Raises StorageError for a block that cannot move."""
    if block.span is None:
        raise StorageError(f"{block} cannot move; this is a bug in teraio, please report it")
    return block.span


def in_file(block: Block) -> bool:
    """Whether the block's slot is in a file of the user, so that nobody may write it."""
    return block.slot is not None and block.slot.file is not None


def _lead_bytes(block: Block) -> int:
    """Return where the block begins in its slot: a device with pages copies them whole, with what lies before the block."""
    return slot_of(block).lead_bytes or span_of(block).lead_bytes


def slot_of(block: Block) -> Slot:
    """Return the block's slot. Raises StorageError if it has none."""
    if block.slot is None:
        raise StorageError(f"{block} has no slot; this is a bug in teraio, please report it")
    return block.slot


def storage_of(block: Block) -> torch.UntypedStorage:
    """Return the block's storage. Raises StorageError if nobody holds it."""
    storage = block.storage()
    if storage is None:
        raise StorageError(f"{block} is moved, but nobody holds it; this is a bug in teraio, please report it")
    return storage
