"""The base of all stores: which bytes are free, and which slots are in use."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from planner.errors import StorageError
from planner.schema import WaitingTier
from runtime.storage.slots import Chunk, Extent, FilePlace, Slot, align_up

_Hole = tuple[int, int]  # offset and length
_length = itemgetter(1)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate, in <linux/falloc.h>
_NO_ACCESS, _FIXED, _PRIVATE, _ANONYMOUS = 0, 0x10, mmap.MAP_PRIVATE, mmap.MAP_ANONYMOUS
_FAILED = ctypes.c_void_p(-1).value


class Store(ABC):
    """Hands out slots and copies bytes between them and memory. All calls are safe from several threads.

    Addresses are aligned and point to `slot.size_bytes` bytes. The caller owns this memory. Until the call has returned,
    nobody may free it, and nobody may change bytes that are being written.

    Here is the set of slots in use, guarded by `_lock`. A subclass says where their bytes lie, and copies them: see `ChunkIO`.

    A slot consists of one contiguous range in each of the `_spaces`. If there is no such range, it is put together from the
    largest holes instead, so that all of the capacity can be used. It is taken or released completely or not at all, also if
    memory runs out meanwhile.

    tier: which one it is. used_bytes: what slots take.
    `_spaces`: the free bytes of each file, by its descriptor; the subclass fills it.
    """

    def __init__(self, tier: WaitingTier) -> None:
        self.tier = tier
        self._lock = threading.Lock()
        self._closed = False
        self._spaces: dict[int, FreeSpace] = {}
        self._in_use: set[Slot] = set()
        self._kept: Counter[Slot] = Counter()  # by how many
        self._released: set[Slot] = set()  # those of them that nobody else has any more
        self._gone: deque[Slot] = deque()  # of those that have kept them
        self.used_bytes = 0

    @property
    def drives(self) -> tuple[int, ...]:
        """The drives that extents lie on, each once. A link has a queue for each of them."""
        return tuple(dict.fromkeys(space.drive for space in self._spaces.values()))

    @property
    @abstractmethod
    def limit_bytes(self) -> int:
        """The highest value that `capacity_bytes` can reach now, given the storage budget and the free bytes of the drives."""

    @abstractmethod
    def ensure_capacity(self, size_bytes: int) -> None:
        """Reserve bytes until `capacity_bytes` is at least `size_bytes`. Waits for the file system. Raises StorageFullError."""

    @abstractmethod
    def write_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None: ...

    @abstractmethod
    def read_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None: ...

    @property
    def capacity_bytes(self) -> int:
        """Bytes that are reserved on the drives, used or not."""
        return sum([space.size_bytes for space in self._spaces.values()])

    @property
    def _free_bytes(self) -> int:
        return sum([space.free_bytes for space in self._spaces.values()])

    def allocate(self, size_bytes: int, name: str) -> Slot:
        """Return a slot for a block. Its content is undefined.

        Reserves more bytes on the drives if needed, and then waits for the file system.
        Raises StorageFullError if the drives or the storage budget have too few bytes left.
        """
        size = align_up(max(size_bytes, 1))
        with self._lock:
            self._check_open()
            self._drop_gone()
            used = self.used_bytes + size
            shares = self._make_room(size, name)
            with _AllOrNothing(self._spaces.values()):
                extents = tuple(self._take(shares))
                slot = Slot(name=name, size_bytes=size, content_bytes=size_bytes, extents=extents)
                self._in_use.add(slot)
            self.used_bytes = used
            return slot

    def release(self, slot: Slot) -> None:
        """Take a slot back, as soon as nobody keeps it. Nothing may read, write or map it any more, but for them.

        Raises StorageError if it is not in use.
        """
        with self._lock:
            if self._closed:  # which released all slots
                return
            if not self._has(slot) or slot in self._released:
                raise StorageError(
                    f"the slot of block {slot.name!r} is not in use here; this is a bug in teraio, please report it"
                )
            self._drop_gone()
            if slot in self._kept:
                self._released.add(slot)
            else:
                self._give_back(slot)

    def keep(self, slot: Slot) -> Callable[[], None]:
        """Let a slot that is in use outlive `release` and `close`: its bytes can be read, and no other block gets it, until what
        is returned is called, at any line.
        """
        with self._lock:
            self._kept[slot] += 1
        return partial(self._release_kept, slot)

    def close(self) -> None:
        """Free the bytes. Nothing may be reading or writing. Mappings stay readable. May be called again.

        With slots of `keep`, only what is in no such slot is freed now; these are when each is released.
        """
        with self._lock:
            if self._closed:
                return
            self._drop_gone()
            self._closed = True
            self._in_use.clear()
            self._released.clear()
            self.used_bytes = 0
            if not self._kept:
                self._free_everything()
            else:
                self._free_all_but(list(self._kept))
        self._drop_gone_unless_busy()

    def _release_kept(self, slot: Slot) -> None:
        self._gone.append(slot)
        self._drop_gone_unless_busy()

    def _drop_gone_unless_busy(self) -> None:
        # Garbage collection may call this at any line, also of a thread that has the lock: then a later call does it, or `close`.
        while self._gone and self._lock.acquire(blocking=False):
            try:
                self._drop_gone()
            finally:
                self._lock.release()

    def _drop_gone(self) -> None:
        while self._gone:
            slot = self._gone[0]
            is_last = self._kept[slot] == 1
            if is_last and slot in self._released:  # before it is noted: where memory runs out, a later call does it
                self._give_back(slot)
                self._released.remove(slot)
            self._gone.popleft()
            self._kept[slot] -= 1
            if not is_last:
                continue
            del self._kept[slot]
            if self._closed:
                if self._kept:
                    self._give_back(slot)
                else:
                    self._free_everything()

    def _give_back(self, slot: Slot) -> None:
        """Make the bytes of a slot free: for other blocks, and after `close` for the system. The caller holds the lock."""
        if self._closed:
            self._free_ranges([(each.file_descriptor, each.offset_bytes, each.length_bytes) for each in slot.extents])
            return
        used = self.used_bytes - slot.size_bytes
        with _AllOrNothing(self._spaces.values()):
            for extent in slot.extents:
                self._spaces[extent.file_descriptor].give(extent.offset_bytes, extent.length_bytes)
            self._in_use.remove(slot)
        self.used_bytes = used

    def _has(self, slot: Slot) -> bool:
        """Whether the slot is in use. The caller holds the lock."""
        return slot in self._in_use

    def _free_all_but(self, kept: Sequence[Slot]) -> None:
        """Give the system all bytes back that are not in these slots. The caller holds the lock."""
        extents = [extent for slot in kept for extent in slot.extents]
        for file, space in self._spaces.items():
            ends = [0, *sorted(each.offset_bytes + each.length_bytes for each in extents if each.file_descriptor == file)]
            begins = [*sorted(each.offset_bytes for each in extents if each.file_descriptor == file), space.size_bytes]
            self._free_ranges([(file, end, begin - end) for end, begin in zip(ends, begins, strict=True) if begin > end])

    def _free_ranges(self, ranges: Sequence[FilePlace]) -> None:
        """Give bytes back to the system. Where a file system cannot do that, they are free when the file is closed."""
        call = ctypes.CDLL(None).fallocate
        call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        for file, offset, length in ranges:
            call(file, _KEEP_SIZE | _PUNCH_HOLE, offset, length)  # it reads as zeros then; the file's size stays

    @abstractmethod
    def _make_room(self, size_bytes: int, name: str) -> Sequence[int]:
        """Make sure that `size_bytes` (aligned) are free, and return how they should be divided over the spaces.

        name: of the block. Raises StorageFullError. The caller holds the lock.
        """

    @abstractmethod
    def _free_everything(self) -> None:
        """Free the files or the memory. Called once. The caller holds the lock."""

    def _check_readable(self, slot: Slot) -> None:
        """Raise StorageError if the store is closed, and neither the slot nor the one that it is a range of is of `keep`."""
        if (slot.of or slot) not in self._kept:
            self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"the {self.tier} tier is closed; compile the model again to open a new one")

    def _take(self, shares: Sequence[int]) -> list[Extent]:
        """Take from each space its share, or as much in all from where room is. The caller has made room."""
        divided = list(zip(self._spaces.values(), shares, strict=True))
        if all([space.largest_bytes >= share for space, share in divided]):
            return [extent for space, share in divided if share for extent in space.take(share)]
        taken, left = [], sum(shares)
        while left:  # the largest holes first: the fewer pieces, the fewer copies
            found = max(self._spaces.values(), key=lambda space: space.largest_bytes).take(left)
            taken += found
            left -= sum([extent.length_bytes for extent in found])
        return taken


# -- slots that are mapped for reading while they stay in their store

_READERS: WeakKeyDictionary[Slot, weakref.ref[torch.UntypedStorage]] = WeakKeyDictionary()


def map_slot(store: Store, slot: Slot, lead_bytes: int, size_bytes: int) -> torch.UntypedStorage:
    """Return a storage in main memory over so many bytes of a slot from `lead_bytes` on, read from its file as they are touched.

    One for all who ask while it lives. What is written to it stays in main memory. The store keeps the slot as long, see
    `Store.keep`. Raises StorageError if the system refuses the mapping, StorageIOError if the slot is in a file of the user that
    has changed.
    """
    reader = _READERS.get(slot)
    if reader is not None and (found := reader()) is not None:
        return found
    if slot.file is not None:
        slot.file.check(slot.name)  # whoever touches what is mapped beyond the end of a file ends the process
    base = _map(None, slot.size_bytes, _NO_ACCESS, _PRIVATE | _ANONYMOUS, -1, 0)
    try:
        at = base
        for extent in slot.extents:
            access = mmap.PROT_READ | mmap.PROT_WRITE
            _map(at, extent.length_bytes, access, _PRIVATE | _FIXED, extent.file_descriptor, extent.offset_bytes)
            at += extent.length_bytes
    except BaseException:
        _unmap(base, slot.size_bytes)
        raise
    memory = (ctypes.c_char * size_bytes).from_address(base + lead_bytes)
    weakref.finalize(memory, _unmap, base, slot.size_bytes).atexit = False
    found = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    weakref.finalize(found, store.keep(slot)).atexit = False
    _READERS[slot] = weakref.ref(found)
    return found


def _map(address: int | None, length_bytes: int, access: int, flags: int, descriptor: int, offset: int) -> int:
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    found: int | None = call(address, length_bytes, access, flags, descriptor, offset)
    if found is None or found == _FAILED:
        raise StorageError(
            f"mmap of {length_bytes} bytes failed: {os.strerror(ctypes.get_errno())}; if memory is free, raise vm.max_map_count"
        )
    return found


def _unmap(address: int, length_bytes: int) -> None:
    call = ctypes.CDLL(None).munmap
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    call(address, length_bytes)


class FreeSpace:
    """The free bytes of a file as a list of holes. A hole is joined with its neighbours when a slot comes back.

    Not thread-safe: the store's lock guards it. Each change is one assignment: an error, such as memory that runs out, leaves
    everything as it was.

    file_descriptor, path, drive: of its extents. address: of the file's first byte in this process's memory; None if it is not
    there. piece_bytes: no extent crosses a multiple of this. size_bytes: of the file, with what is in use.
    """

    def __init__(
        self, file_descriptor: int, path: Path, *, drive: int = 0, address: int | None = None, piece_bytes: int | None = None
    ) -> None:
        self._extent = Extent(file_descriptor=file_descriptor, path=path, offset_bytes=0, length_bytes=0, drive=drive)
        self._address, self._piece_bytes = address, piece_bytes
        self.drive, self.size_bytes = drive, 0
        self._holes: tuple[_Hole, ...] = ()  # from the lowest offset to the highest

    @property
    def free_bytes(self) -> int:
        """Sum of all holes."""
        return sum([length for _, length in self._holes])

    @property
    def largest_bytes(self) -> int:
        """Length of the largest hole, 0 if there is none."""
        return max((length for _, length in self._holes), default=0)

    @property
    def tail_bytes(self) -> int:
        """Length of the hole at the end of the file, 0 if there is none."""
        offset, length = self._holes[-1] if self._holes else (0, 0)
        return length if offset + length == self.size_bytes else 0

    def grow(self, more_bytes: int) -> None:
        """The file has so many more bytes at its end, all free."""
        holes = self._with_hole(self.size_bytes, more_bytes)
        self._holes, self.size_bytes = holes, self.size_bytes + more_bytes

    def take(self, size_bytes: int) -> list[Extent]:
        """Take `size_bytes` from the smallest hole that is large enough, or all of the largest hole if none is.

        Of equal holes, that with the lowest offset serves. There must be a hole.
        """
        fitting = [hole for hole in self._holes if hole[1] >= size_bytes]
        hole = min(fitting, key=_length) if fitting else max(self._holes, key=_length)
        place, taken = bisect_left(self._holes, hole), min(hole[1], size_bytes)
        rest = [(hole[0] + taken, hole[1] - taken)] if hole[1] > taken else []
        self._holes = (*self._holes[:place], *rest, *self._holes[place + 1 :])
        return self._extents(hole[0], taken)

    def _extents(self, offset: int, length: int) -> list[Extent]:
        found = []
        while length:
            size = length if self._piece_bytes is None else min(length, self._piece_bytes - offset % self._piece_bytes)
            address = None if self._address is None else self._address + offset
            found.append(replace(self._extent, offset_bytes=offset, length_bytes=size, address=address))
            offset, length = offset + size, length - size
        return found

    def give(self, offset: int, length_bytes: int) -> None:
        """Make a range free, which must be in use. Join it with the holes on both sides."""
        self._holes = self._with_hole(offset, length_bytes)

    def _with_hole(self, offset: int, length: int) -> tuple[_Hole, ...]:
        begin = end = bisect_left(self._holes, (offset, 0))
        if end < len(self._holes) and self._holes[end][0] == offset + length:
            length += self._holes[end][1]
            end += 1
        if begin > 0 and sum(self._holes[begin - 1]) == offset:
            begin -= 1
            offset, length = self._holes[begin][0], length + self._holes[begin][1]
        return (*self._holes[:begin], (offset, length), *self._holes[end:])


class _AllOrNothing:
    """A context: if what is taken or given inside fails, all of it is put back. The spaces must not grow inside."""

    __slots__ = ("_before",)

    def __init__(self, spaces: Iterable[FreeSpace]) -> None:
        self._before = [(space, space._holes) for space in spaces]

    def __enter__(self) -> None:
        """Nothing has changed since it was made."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for space, holes in self._before:
                space._holes = holes
