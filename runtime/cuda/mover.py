"""Moves blocks of a device with streams: to the host tier by its copy engines, to drives by I/O threads.

While a block is in the host tier, its storage points to its slot there. User code that touches the block reads and writes
the slot through the bus. User code that touches a block on a drive gets an error that says what to do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from planner.errors import StorageError
from planner.schema import WaitingTier
from runtime.cuda.host_copies import HostCopies, LastPoint, QueuedRange
from runtime.device import COMPUTE, INWARD, OUTWARD, USER, Event, Lane, Span, Streams
from runtime.paging import POISON, Block, BlockTransfers, Debug, Done, StorageOwnership, Tier, Tiers, dropped_message
from runtime.storage import Extent, RangeCopy, Slot, slot_range
from runtime.system import storage_swap

_Queued = tuple[Event, torch.UntypedStorage, int]
"""The end of a copy out or in that the device may not have ended yet; the storage, which it keeps alive (rule 5); and the number
of the copy, in the order in which they were queued."""


class StreamMover:
    """A `Mover` for a device with streams, see [Note: What orders what].

    host_address: returns where an extent of the host tier lies in memory.
    in_reach: whether kernels can read and write the host tier, as they can if it is pinned. If not, user code cannot touch
    the blocks there.
    debug: see [Note: Debug mode]. The host then waits for the device whenever it reads the device's memory.
    ownership: shared by all movers of the process; default: one of its own.
    """

    def __init__(
        self,
        streams: Streams,
        tiers: Tiers,
        host_address: Callable[[Extent], int],
        *,
        in_reach: bool = True,
        debug: Debug | None = None,
        ownership: StorageOwnership | None = None,
    ) -> None:
        self._debug = debug
        self._ownership = ownership or StorageOwnership()
        self._streams = streams
        self._tiers = tiers
        self._in_reach = in_reach
        self._threaded = frozenset(tier.name for tier in tiers if tier.engine is not None)
        self._transfers = BlockTransfers(tiers)
        self._fresh: dict[Block, torch.UntypedStorage] = {}
        self._out: dict[Block, _Queued] = {}
        self._of_forgotten: list[_Queued] = []
        self._in: dict[Block, _Queued] = {}
        self._last: dict[Block, tuple[Event]] = {}  # the end of the last copy from or to a slot; earlier ones end before it
        self._queued = 0  # copies so far
        self._joined = 0  # number of the last copy in that computation waits for
        self._copies = HostCopies(streams, host_address)
        self._computed = LastPoint(streams, shares=debug is None)  # the debug mode fills memory in the lane of computation

    @property
    def moved_bytes(self) -> Mapping[str, int]:
        """Bytes of the copies between device and host tier that are known to have ended, by link, since the start."""
        return self._copies.moved_bytes

    @property
    def busy_seconds(self) -> Mapping[str, float]:
        """Duration of the copies that `moved_bytes` counts, by link."""
        return self._copies.busy_seconds

    @property
    def keeps_mappings(self) -> bool:
        """Only in the debug mode: user code changes the only copy of a block, so no second copy becomes invalid."""
        return self._debug is not None

    def span(self, storage: torch.UntypedStorage) -> Span | None:
        mine = self._streams.can_move(storage) and self._ownership.claim(storage, self)
        return _span(storage.nbytes()) if mine else None

    def is_same(self, block: Block, storage: torch.UntypedStorage) -> bool:
        return storage_swap.address(storage) == block.address

    def maybe_replaced(self, blocks: Sequence[Block]) -> Sequence[Block]:
        keys, addresses, sizes = [b.key for b in blocks], [b.address for b in blocks], [b.size_bytes for b in blocks]
        return [blocks[position] for position in storage_swap.changed(keys, addresses, sizes)]

    def adopt(self, storage: torch.UntypedStorage) -> None:
        """Do nothing: all of the device's own memory can be given back."""

    def leave(self, storage: torch.UntypedStorage) -> None:
        self._ownership.leave(storage)

    def trim(self, spare_bytes: int) -> None:
        self._streams.trim(spare_bytes)

    def together(self) -> LastPoint:
        return self._computed

    # -- out

    def has_room(self, block: Block, tier: WaitingTier) -> bool:
        return self._tiers.has_room(block, block.size_bytes, tier)

    def copy_out(self, block: Block, tier: WaitingTier | None, done: Done) -> bool:
        self._join([block])
        if block.kind == "gradient":
            tier = None  # user code clips gradients or adds to them before the step: prefer the tier where it can touch them
        place = self._tiers.place(block, block.size_bytes, tier)
        if self._debug is not None:
            self._streams.wait(OUTWARD, self._computed.event())
            self._debug.leaves(block, self._streams.read(OUTWARD, block.address, block.size_bytes))
        if place.engine is not None:
            self._transfers.write(place, block, block.address, done, ready=self._computed.event().wait)
            return False
        follows = not self._computed.hold(OUTWARD)
        copied = self._copies.queue(OUTWARD, _slot(block), block.size_bytes, block.address, follows=follows)
        self._out.pop(block, None)  # its last copy: `_out` and `_in` have the order in which the device ends the copies
        self._queued += 1
        self._out[block] = copied, _storage(block), self._queued
        self._note_last(block, copied)
        return True

    def finished(self, block: Block) -> bool:
        last = self._last.get(block)
        return last is None or last[0].done()

    def _note_last(self, block: Block, copied: Event) -> None:
        self._last.pop(block, None)
        self._last[block] = (copied,)

    def release(self, block: Block) -> None:
        storage, stand_in = self._leave(block), None
        if self._in_reach and block.slot is not None and block.tier not in self._threaded:
            stand_in = block.slot.address
        block.address = stand_in or 0
        if stand_in is None:
            storage_swap.discard(storage, _not_here(block))
        else:
            storage_swap.lend(storage, stand_in)

    def _leave(self, block: Block) -> torch.UntypedStorage:
        """Make computation wait for the block's copies before its memory is freed. Return its storage.

        What user code allocated goes back to the pool of its own stream, where nothing waits for computation. So the host
        waits (rule 6): once for each such block, since it comes back in memory of the lane of computation.
        """
        if block in self._in:
            self._join([block])
        leaving = self._out.pop(block, None)
        if leaving is not None:
            self._streams.wait(COMPUTE, leaving[0])
            self._computed.passed()
        storage = block.storage()
        if storage is None:
            raise _lost(block)
        if self._debug is not None:
            self._poison_left(block)
        if block.users_memory:
            self._streams.record(COMPUTE).wait()
            block.users_memory = False
        return storage

    def discard(self, block: Block) -> None:
        if self._debug is not None:
            self._join([block])
            self._debug.drops(block, self._streams.read(COMPUTE, block.address, block.size_bytes))
        storage_swap.discard(self._leave(block), dropped_message(block))
        block.address = 0

    def renew(self, block: Block, fresh: torch.UntypedStorage) -> None:
        storage = _storage(block)
        if self._debug is not None:
            address = storage_swap.address(fresh)
            self._debug.made_anew(block, self._streams.read(COMPUTE, address, block.size_bytes))
        storage_swap.renew(storage, fresh)
        block.address = storage_swap.address(storage)

    def drop_copy(self, block: Block) -> None:
        """Free the slot at once. Computation waits for reads of it, and later copies out wait for computation: rules 1 and 3."""
        self._tiers.free(block)

    def _poison_left(self, block: Block) -> None:
        self._streams.fill(COMPUTE, block.address, block.size_bytes, POISON)
        if not self._streams.in_region:  # user code may get this memory, and does not wait for the lane of computation
            self._streams.record(COMPUTE).wait()

    def host_address(self, block: Block) -> int | None:
        return None if block.slot is None or block.tier in self._threaded else block.slot.address

    # -- in

    def copy_in(self, block: Block, done: Done) -> bool:
        storage, slot = block.storage(), block.slot
        if storage is None or slot is None:
            raise _lost(block)
        threaded, streams = block.tier in self._threaded, self._streams
        self._fresh[block] = area = streams.allocate(block.size_bytes)
        address, follows = area.data_ptr(), False
        if threaded or self._debug is not None or not streams.in_region:
            before = [self._computed.event()]
            if not streams.in_region:
                before.append(streams.record(USER))
            if self._debug is not None:
                before = [self._poison_arriving(address, block.size_bytes, before)]
            if threaded:
                self._read(self._tiers.of(block), block, address, before, done)
                return False
            for event in before:
                streams.wait(INWARD, event)
        else:
            follows = not self._computed.hold(INWARD)
        copied = self._copies.queue(INWARD, slot, block.size_bytes, address, follows=follows)
        self._queued += 1
        self._in[block] = copied, storage, self._queued
        self._note_last(block, copied)
        return True

    def _poison_arriving(self, address: int, size_bytes: int, before: Sequence[Event]) -> Event:
        """Fill memory with poison after `before`. Return the event that the copy in waits for instead."""
        for event in before:
            self._streams.wait(INWARD, event)
        self._streams.fill(INWARD, address, size_bytes, POISON)
        return self._streams.record(INWARD)

    def _read(self, place: Tier, block: Block, address: int, before: Sequence[Event], done: Done) -> None:
        def ready() -> None:
            for event in before:
                event.wait()

        def drop() -> None:
            for event in before:  # the memory may be in use until then (rule 4)
                self._streams.wait(COMPUTE, event)
            del self._fresh[block]

        def landed(error: StorageError | None) -> None:
            try:
                if error is not None:
                    drop()
            finally:
                done(error)

        try:
            self._transfers.read(place, block, address, landed, ready)
        except StorageError:
            drop()
            raise

    def install(self, block: Block) -> None:
        storage = block.storage()
        if storage is None:
            raise _lost(block)
        block.address = storage_swap.install(storage, self._fresh.pop(block))
        if self._debug is not None:
            self._debug.arrives(block)

    def wait_resident(self, blocks: Sequence[Block]) -> None:
        self._join(blocks)
        if self._debug is not None:
            self._debug.check(blocks, lambda block: self._streams.read(COMPUTE, block.address, block.size_bytes))

    def _join(self, blocks: Sequence[Block]) -> None:
        """Make computation wait for the copies in of these blocks: for the last one, since one ends after the other."""
        if not self._in:
            return
        arriving = [block for block in blocks if block in self._in]
        if not arriving:
            return
        event, _, number = self._in[arriving[0]]
        for block in arriving:
            if self._in[block][2] > number:
                event, _, number = self._in[block]
        if number > self._joined:
            self._streams.wait(COMPUTE, event)
            self._computed.passed()
            self._joined = number
        for block in arriving:
            self._in.pop(block, None)

    # -- ranges of slots

    def read_range(self, block: Block, begin_bytes: int, memory: torch.Tensor) -> RangeCopy:
        place, before = self._tiers.of(block), self._streams.record(COMPUTE)
        if self._debug is not None:
            before = self._poison_arriving(memory.data_ptr(), memory.nbytes, [before])
        if place.engine is not None:
            return self._transfers.read_range(place, block, begin_bytes, memory, before.wait)
        self._streams.wait(INWARD, before)
        return self._queue_range(INWARD, block, begin_bytes, memory)

    def write_range(self, block: Block, begin_bytes: int, memory: torch.Tensor) -> RangeCopy:
        place, computed = self._tiers.of(block), self._streams.record(COMPUTE)
        if self._debug is not None:
            self._debug.distrust(block)
        if place.engine is not None:
            return self._transfers.write_range(place, block, begin_bytes, memory, computed.wait)
        self._streams.wait(OUTWARD, computed)
        return self._queue_range(OUTWARD, block, begin_bytes, memory)

    def _queue_range(self, lane: Lane, block: Block, begin_bytes: int, memory: torch.Tensor) -> RangeCopy:
        place = slot_range(_slot(block), begin_bytes, memory.nbytes)
        copied = self._copies.queue(lane, place, place.content_bytes, memory.data_ptr())
        self._note_last(block, copied)
        return QueuedRange(self._streams, copied, memory)

    # -- the rest

    def prioritize(self, block: Block) -> None:
        self._transfers.prioritize(block)

    def check(self) -> None:
        self._transfers.check()

    def poll(self) -> None:
        _drop_ended(self._in)
        _drop_ended(self._out)
        _drop_ended(self._last)
        if self._of_forgotten:
            self._of_forgotten = [leaving for leaving in self._of_forgotten if not leaving[0].done()]
        self._copies.count()

    def invalidate_mapping(self, block: Block) -> None:
        """Do nothing outside the debug mode, see `keeps_mappings`."""
        if self._debug is not None and self.host_address(block) is not None:
            self._debug.distrust(block)

    def forget(self, block: Block) -> None:
        if self._debug is not None:
            self._debug.forget(block)
        self._join([block])
        self._last.pop(block, None)
        leaving = self._out.pop(block, None)
        if leaving is not None:
            self._of_forgotten.append(leaving)
        self._transfers.forget(block)
        self._ownership.give_up(block.key, self)
        if block.slot is not None:
            self._tiers.free(block)

    def close(self) -> None:
        """Wait until the device has ended all copies. The memory of the host tier may be freed next."""
        for lane in Lane:
            self._streams.record(lane).wait()
        self._of_forgotten.clear()
        self._ownership.give_up_all(self)


def _drop_ended(copies: dict[Block, _Queued] | dict[Block, tuple[Event]]) -> None:
    ended = []
    for block, queued in copies.items():
        if not queued[0].done():
            break
        ended.append(block)
    for block in ended:
        del copies[block]


@functools.lru_cache(maxsize=1024)
def _span(size_bytes: int) -> Span:
    """Return one for all storages of a size: their pages have no place that matters."""
    return Span(0, size_bytes)


def _storage(block: Block) -> torch.UntypedStorage:
    storage = block.storage()
    if storage is None:
        raise _lost(block)
    return storage


def _lost(block: Block) -> StorageError:
    return StorageError(f"{block} is moved, but nobody holds it, or it has no slot; this is a bug in teraio, please report it")


def _slot(block: Block) -> Slot:
    if block.slot is None:
        raise StorageError(f"{block} has no slot; this is a bug in teraio, please report it")
    return block.slot


def _not_here(block: Block) -> str:
    return (
        f"{block.name} ({block.kind}, {block.size_bytes:,} bytes) is not in memory: teraio has moved it to {block.tier}. "
        "Use it inside `with teraio.on_device([tensor]):`, raise memory_budget, or give a host_budget that holds it"
    )
