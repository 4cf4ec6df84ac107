"""Moves blocks of a device with streams: to the host tier by its copy engines, to drives by I/O threads.

While a block is in the host tier, its storage points to its slot there. User code that touches the block reads and writes
the slot through the bus. User code that touches a block on a drive gets an error that says what to do.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch

from planner.errors import StorageError
from planner.schema import WaitingTier
from runtime.device import COMPUTE, INWARD, OUTWARD, USER, Event, Lane, Span, Streams, TimedEvent
from runtime.paging import DROPPED, POISON, Block, Done, LeftBehind, Mover, Tiers, dropped_message, slot_of, storage_of
from runtime.storage import RangeCopy, Slot, cut_slot, slot_range
from runtime.system import annotate, storage_swap

# The end of a copy out or in that the device may not have ended yet; the storage, which it keeps alive (rule 5); and the
# number of the copy, in the order in which they were queued.
_Queued = tuple[Event, torch.UntypedStorage, int]


class StreamMover(Mover):
    """A `Mover` for a device with streams, see [Note: What orders what].

    User code and the host's processor change the only copy of a block, so nothing becomes invalid.

    in_reach: whether kernels can read and write the host tier, as they can if it is pinned. If not, user code cannot touch
    the blocks there.
    poison: see [Note: Debug mode].
    moved_bytes, busy_seconds: of the copies between device and host tier, see `HostCopies`.
    """

    def __init__(self, streams: Streams, tiers: Tiers, *, in_reach: bool = True, poison: bool = False) -> None:
        self.tiers = tiers
        self._streams = streams
        self._poison = poison
        self._in_reach = in_reach
        self._threaded = frozenset(tier.name for tier in tiers if tier.engine is not None)
        self._fresh: dict[Block, torch.UntypedStorage] = {}
        self._out: dict[Block, _Queued] = {}
        self._of_forgotten: list[_Queued] = []
        self._in: dict[Block, _Queued] = {}
        self._last: dict[Block, tuple[Event]] = {}  # the end of the last copy from or to a slot; earlier ones end before it
        self._queued = 0  # copies so far
        self._joined = 0  # number of the last copy in that computation waits for
        self._copies = HostCopies(streams)
        self.moved_bytes, self.busy_seconds = self._copies.moved_bytes, self._copies.busy_seconds
        self._computed = LastPoint(streams, shares=not poison)  # poison is written in the lane of computation
        self.together: AbstractContextManager[object] = self._computed

    def span(self, storage: torch.UntypedStorage, *, adopt: bool = False) -> Span | None:
        """Return the whole storage; nothing has to be moved for it: all of the device's own memory can be given back."""
        left = self.tiers.ownership.left_behind(storage)
        if left is not None:
            if not adopt or self.tiers.ownership.stays(storage):
                return None
            self._take_over(storage, left)
        mine = self._streams.can_move(storage) and self.tiers.ownership.claim(storage, self.tiers)
        return _span(storage.nbytes()) if mine else None

    def _take_over(self, storage: torch.UntypedStorage, left: LeftBehind) -> None:
        """Bring in what an earlier run has left: by a copy from the memory that stands in for it, or from its drive. Waits."""
        area = self._streams.allocate(storage.nbytes())
        for event in (self._computed.event(), self._streams.record(USER)):
            event.wait()
        address = storage_swap.address(storage)
        if address:
            self._streams.copy(INWARD, target=area.data_ptr(), source=address, size_bytes=storage.nbytes())
            self._streams.record(INWARD).wait()
        else:
            for chunk in cut_slot(left.slot, left.slot.size_bytes):
                left.store.read_chunk(left.slot, chunk, area.data_ptr() - left.slot.lead_bytes)
        storage_swap.install(storage, area)
        self.tiers.ownership.taken(storage)

    def replaced(self, blocks: Sequence[Block]) -> Sequence[Block]:
        if len(blocks) == 1:  # a stage has met one again: as fast as can be
            held = blocks[0].storage()
            return () if held is None or storage_swap.address(held) == blocks[0].address else blocks
        keys, addresses, sizes = [b.key for b in blocks], [b.address for b in blocks], [b.size_bytes for b in blocks]
        return [blocks[position] for position in storage_swap.changed(keys, addresses, sizes)]

    def begin_in_file(self, slot: Slot) -> tuple[Block, torch.UntypedStorage]:
        storage = storage_swap.without_memory(slot.content_bytes, self._streams.device)
        self.tiers.ownership.claim(storage, self.tiers)
        span = _span(slot.content_bytes)
        block = Block(held=storage, name=slot.name, kind="parameter", user_visible=True, span=span, at=0)
        block.tier = "storage"
        storage_swap.discard(storage, _not_here(block))
        return block, storage

    # -- out

    def copy_out(self, block: Block, tier: WaitingTier | None, done: Done) -> bool:
        self.wait_resident([block])  # the copy out waits for computation (rule 1), and that for the block's copy in
        if block.kind == "gradient":
            tier = None  # user code clips gradients or adds to them before the step: prefer the tier where it can touch them
        if self.tiers.place(block, tier).engine is not None:
            self.tiers.write(block, block.tier, block.address - slot_of(block).lead_bytes, done, self._computed.event().wait)
            return False
        follows = not self._computed.hold(OUTWARD)  # rule 1
        copied = self._copies.queue(OUTWARD, slot_of(block), block.size_bytes, block.address, follows=follows)
        self._out.pop(block, None)  # its last copy: `_out` and `_in` have the order in which the device ends the copies
        self._queued += 1
        self._out[block] = copied, storage_of(block), self._queued
        self._note_last(block, copied)
        return True

    def finished(self, blocks: Iterable[Block]) -> list[Block]:
        # Let go of what copies have kept alive that are known to have ended (rule 5), and count them.
        for copies in (self._in, self._out, self._last):
            _drop_ended(copies)
        if self._of_forgotten:
            self._of_forgotten = [leaving for leaving in self._of_forgotten if not leaving[0].done()]
        self._copies.count()
        found = []
        for block in blocks:
            last = self._last.get(block)
            if last is not None and not last[0].done():
                break
            found.append(block)
        return found

    def _note_last(self, block: Block, copied: Event) -> None:
        self._last.pop(block, None)
        self._last[block] = (copied,)

    def release(self, block: Block) -> None:
        storage, stand_in = self._leave(block), self.tiers.host_address(block) if self._in_reach else None
        block.address = stand_in or 0
        if stand_in is None:
            storage_swap.discard(storage, dropped_message(block) if block.state is DROPPED else _not_here(block))
        else:
            storage_swap.lend(storage, stand_in)

    def _leave(self, block: Block) -> torch.UntypedStorage:
        """Make computation wait for the block's copies before its memory is freed (rule 4). Return its storage."""
        if block in self._in:
            self.wait_resident([block])
        self._wait_copied(block)
        storage = storage_of(block)
        if self._poison:
            self._streams.fill(COMPUTE, block.address, block.size_bytes, POISON)
            if not self._streams.in_region:  # user code may get this memory, and does not wait for the lane of computation
                self._streams.record(COMPUTE).wait()
        return storage

    def _wait_copied(self, block: Block) -> None:
        """Make computation wait for the block's copy out."""
        leaving = self._out.pop(block, None)
        if leaving is not None:
            self._streams.wait(COMPUTE, leaving[0])
            self._computed.passed()

    # -- in

    def copy_in(self, block: Block, done: Done) -> bool:
        storage, slot = storage_of(block), slot_of(block)
        threaded, streams = block.tier in self._threaded, self._streams
        self._fresh[block] = area = streams.allocate(block.size_bytes)
        address, follows = area.data_ptr(), False
        if threaded or self._poison or not streams.in_region:
            before = [self._computed.event()]  # rule 2
            if not streams.in_region:  # user code may have queued work since the region, which used that memory or wrote the slot
                before.append(streams.record(USER))
            if self._poison:
                before = [self._poison_arriving(address, block.size_bytes, before)]
            if threaded:
                self._read(block, address, before, done)
                return False
            for event in before:
                streams.wait(INWARD, event)
        else:
            follows = not self._computed.hold(INWARD)  # rule 2: the user's work comes before the region, so before this point
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

    def _read(self, block: Block, address: int, before: Sequence[Event], done: Done) -> None:
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
            self.tiers.read(block, address - slot_of(block).lead_bytes, landed, ready)
        except StorageError:
            drop()
            raise

    def install(self, block: Block, fresh: torch.UntypedStorage | None = None) -> None:
        if fresh is not None:
            self._computed.passed()  # the device fills it in the lane of computation
            self._wait_copied(block)  # rule 4
        block.address = storage_swap.install(storage_of(block), self._fresh.pop(block) if fresh is None else fresh)

    def wait_resident(self, blocks: Sequence[Block]) -> None:
        """Make computation wait for the copies in of these blocks (rule 3)."""
        if not self._in:
            return
        arriving = [block for block in blocks if block in self._in]
        if not arriving:
            return
        event, _, number = self._in[arriving[0]]
        for block in arriving:  # for the last one, since one ends after the other
            if self._in[block][2] > number:
                event, _, number = self._in[block]
        if number > self._joined:  # else computation waits already for a later copy in
            self._streams.wait(COMPUTE, event)
            self._computed.passed()
            self._joined = number
        for block in arriving:
            self._in.pop(block, None)

    # -- ranges of slots

    def copy_range(self, block: Block, begin_bytes: int, memory: torch.Tensor, *, to_slot: bool) -> RangeCopy:
        before = self._streams.record(COMPUTE)
        if self._poison and not to_slot:
            before = self._poison_arriving(memory.data_ptr(), memory.nbytes, [before])
        if self.tiers.of(block).engine is not None:
            return self.tiers.copy_range(block, begin_bytes, memory, before.wait, to_slot=to_slot).wait
        lane = OUTWARD if to_slot else INWARD
        self._streams.wait(lane, before)
        part = slot_range(slot_of(block), begin_bytes, memory.nbytes)
        copied = self._copies.queue(lane, part, part.content_bytes, memory.data_ptr())
        self._note_last(block, copied)
        held = [memory]

        def wait() -> None:
            """Order computation after the copy. The host never waits. Until then the memory is kept alive (rule 5)."""
            self._streams.wait(COMPUTE, copied)
            held.clear()

        return wait

    # -- the rest

    def read(self, address: int, size_bytes: int, leaving: bool) -> memoryview:
        """Return bytes of the device as a stage that is queued next would see them; if `leaving`, as a copy out. Waits."""
        if leaving:
            self._streams.wait(OUTWARD, self._computed.event())  # rule 1
        return self._streams.read(OUTWARD if leaving else COMPUTE, address, size_bytes)

    def forget(self, block: Block) -> None:
        self.wait_resident([block])
        self._last.pop(block, None)
        leaving = self._out.pop(block, None)
        if leaving is not None:
            self._of_forgotten.append(leaving)  # the copy out still reads its memory (rule 5)
        self.tiers.forget(block)

    def close(self) -> None:
        """Wait until the device has ended all copies. The memory of the host tier may be freed next."""
        for lane in Lane:
            self._streams.record(lane).wait()
        self._of_forgotten.clear()
        self.tiers.close()


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


def _not_here(block: Block) -> str:
    return (
        f"{block.name} ({block.kind}, {block.size_bytes:,} bytes) is not in memory: teraio has moved it to {block.tier}. "
        "Use it inside `with teraio.on_device([tensor]):`, raise memory_budget, or give a host_budget that holds it"
    )


# -- copies that the device makes by itself to and from the host tier

_LINKS = {OUTWARD: "device->host", INWARD: "host->device"}

# Bytes, begin and end of a copy to or from the host tier. It is counted once it has ended.
_Copy = tuple[int, TimedEvent, TimedEvent]


class HostCopies:
    """Queues copies between the device and the host tier, and counts them.

    moved_bytes, busy_seconds: of the copies that are known to have ended, by link, since the start. Of copies that follow each
    other, the time between them counts as well: it is what the host takes to queue the next one.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._copies: dict[Lane, list[_Copy]] = {lane: [] for lane in _LINKS}
        self._ends: dict[Lane, TimedEvent] = {}
        self.moved_bytes = dict.fromkeys(_LINKS.values(), 0)
        self.busy_seconds = dict.fromkeys(_LINKS.values(), 0.0)

    def queue(self, lane: Lane, slot: Slot, size_bytes: int, address: int, *, follows: bool = False) -> Event:
        """Queue a copy of a slot's first `size_bytes` to or from the device memory at `address`. Return the event of its end.

        follows: nothing was queued in the lane since the last copy there: this one begins when that one ends.
        """
        streams, left = self._streams, size_bytes
        before = (self._ends.get(lane) if follows else None) or streams.mark_lane(lane)
        with annotate("copy", slot.name, _LINKS[lane]):
            for extent in slot.extents:
                on_host, size = extent.address, extent.length_bytes
                assert on_host is not None  # the host tier is in memory
                if size > left:  # slots are rounded up, blocks are not
                    size = left
                if lane is OUTWARD:
                    streams.copy(lane, target=on_host, source=address, size_bytes=size)
                else:
                    streams.copy(lane, target=address, source=on_host, size_bytes=size)
                address, left = address + size, left - size
        self._ends[lane] = after = streams.mark_lane(lane)
        self._copies[lane].append((size_bytes, before, after))
        return after

    def count(self) -> None:
        """Count the copies that have ended since the last call. Those of a lane end in the order in which they were queued."""
        for lane, copies in self._copies.items():
            ended = bisect_left(copies, True, key=lambda copy: not copy[2].done())
            seconds, first = 0.0, 0
            for number in range(1, ended + 1):  # copies that follow each other are one
                if number == ended or copies[number][1] is not copies[number - 1][2]:
                    seconds += copies[number - 1][2].seconds_since(copies[first][1])
                    first = number
            self.moved_bytes[_LINKS[lane]] += sum([size for size, _, _ in copies[:ended]])
            self.busy_seconds[_LINKS[lane]] += seconds
            del copies[:ended]


class LastPoint:
    """The latest point in the lane of computation. As a context: copies begin together, and share one point.

    Only the training thread enters the context, with the lock of the pager held, and queues no stage within it. shares: False
    takes a point for each copy.
    """

    # So nothing comes into the lane of computation meanwhile, but for the mover's own waits for copies. It tells of them by
    # `passed`: memory that is freed after such a wait may serve the next copy in (rules 2 and 4).

    def __init__(self, streams: Streams, *, shares: bool = True) -> None:
        self._streams = streams
        self._shares = shares
        self._together = False
        self._event: Event | None = None
        self._held: set[Lane] = set()

    def __enter__(self) -> None:
        self._event, self._together = None, self._shares

    def __exit__(self, *_: object) -> None:
        self._event, self._together = None, False

    def passed(self) -> None:
        """Something was queued in the lane of computation."""
        self._event = None

    def event(self) -> Event:
        """Return the point after all computation that was queued so far."""
        if self._event is not None:
            return self._event
        event = self._streams.record(COMPUTE)
        self._held.clear()
        if self._together:
            self._event = event
        return event

    def hold(self, lane: Lane) -> bool:
        """Make what is queued in `lane` from now on wait for all computation that was queued so far.

        Returns False if it does so already: the last thing that was queued in the lane is a copy that has begun together with
        the next one.
        """
        if self._event is not None and lane in self._held:
            return False
        self._streams.wait(lane, self.event())
        self._held.add(lane)
        return True
