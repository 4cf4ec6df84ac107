"""Slots: the room for one block each in files or in memory, and the chunks that they are cut into to be copied."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from planner.errors import StorageError

if TYPE_CHECKING:
    from runtime.storage.user_files import UserFile

# Offsets and sizes in spill files, and addresses in memory, are multiples of this. Direct I/O and mmap need it.
ALIGNMENT_BYTES = max(4096, mmap.PAGESIZE)

_Item = TypeVar("_Item")


def align_up(size_bytes: int) -> int:
    """Return the smallest multiple of ALIGNMENT_BYTES that is at least `size_bytes`."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A contiguous, aligned range of a file. The store owns the file descriptor, which is open for reading and writing; that of
    a user's file only for reading.

    drive: the drive that holds the extent. Extents with the same number share a drive. One of `Store.drives`.
    address: where it begins in this process's memory until its store is closed; None if it is not there.
    """

    file_descriptor: int
    path: Path
    offset_bytes: int
    length_bytes: int
    drive: int = 0
    address: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Slot:
    """Space for one block, from `Store.allocate` to `Store.release`. A slot is equal only to itself.

    name: of the block, for messages.
    size_bytes: aligned size of the slot.
    content_bytes: size of the block itself. A store of device memory touches no memory beyond it.
    extents: in the order of the block's bytes; their lengths add up to `size_bytes`.
    of, begin_bytes: the slot that this one is a range of, see `slot_range`, and where it begins there. A range is never released.
    file: the user's file that the slot is a range of, which is read only, see [Note: Blocks in files]; None for all others.
    lead_bytes: where the block begins in the slot. The bytes before and after it only fill whole pages.
    """

    name: str
    size_bytes: int
    content_bytes: int
    extents: tuple[Extent, ...]
    of: Slot | None = None
    begin_bytes: int = 0
    file: UserFile | None = None
    lead_bytes: int = 0

    @property
    def address(self) -> int | None:
        """Where it begins in this process's memory until its store is closed; None if it is not there, or not in one piece."""
        if len(self.extents) == 1:  # as nearly all have
            return self.extents[0].address
        apart = any(a.offset_bytes + a.length_bytes != b.offset_bytes for a, b in pairwise(self.extents))
        return None if apart else self.extents[0].address


FilePlace = tuple[int, int, int]  # where bytes lie: file descriptor, offset in bytes, length in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The bytes of a slot that one call reads or writes. It gives their place in the file and in the slot."""

    extent: Extent
    file_offset_bytes: int
    slot_offset_bytes: int
    length_bytes: int

    def memory(self, address: int) -> ctypes.Array[ctypes.c_char]:
        """Its bytes in memory that the processor can read. address: of the slot's first byte. Copies nothing."""
        return (ctypes.c_char * self.length_bytes).from_address(address + self.slot_offset_bytes)


def content_of(slot: Slot, chunk: Chunk) -> tuple[int, int]:
    """Return where the block's bytes begin in the chunk, and how many they are. The other bytes only fill up the slot."""
    begin = min(max(slot.lead_bytes - chunk.slot_offset_bytes, 0), chunk.length_bytes)
    end = min(slot.lead_bytes + slot.content_bytes - chunk.slot_offset_bytes, chunk.length_bytes)
    return begin, max(end - begin, 0)


def cut_slot(slot: Slot, chunk_bytes: int) -> tuple[Chunk, ...]:
    """Cut `slot` into chunks of at most `chunk_bytes` (aligned). The extents alternate, so that all drives have work."""
    begin_bytes = 0
    by_extent = []
    for extent in slot.extents:
        whole = Chunk(
            extent=extent, file_offset_bytes=extent.offset_bytes, slot_offset_bytes=begin_bytes, length_bytes=extent.length_bytes
        )
        by_extent.append(cut_chunk(whole, chunk_bytes))
        begin_bytes += extent.length_bytes
    return tuple(alternate(by_extent))


def cut_chunk(chunk: Chunk, chunk_bytes: int) -> list[Chunk]:
    """Cut a chunk into smaller chunks of at most `chunk_bytes`, in order."""
    return [
        replace(
            chunk,
            file_offset_bytes=chunk.file_offset_bytes + begin,
            slot_offset_bytes=chunk.slot_offset_bytes + begin,
            length_bytes=min(chunk_bytes, chunk.length_bytes - begin),
        )
        for begin in range(0, chunk.length_bytes, chunk_bytes)
    ]


def slot_range(slot: Slot, begin_bytes: int, size_bytes: int) -> Slot:
    """Return `size_bytes` of `slot` from `begin_bytes` on, or fewer if the slot ends before. The result is for copies only.

    Raises StorageError unless both are multiples of ALIGNMENT_BYTES and the range begins within the slot; always for a slot in a
    file of the user, which nobody may write.
    """
    end = min(begin_bytes + size_bytes, slot.size_bytes)
    if slot.file is not None or begin_bytes % ALIGNMENT_BYTES or size_bytes % ALIGNMENT_BYTES or not 0 <= begin_bytes < end:
        raise StorageError(
            f"bytes {begin_bytes:,} to {begin_bytes + size_bytes:,} are no range of the slot of block {slot.name!r}, which has "
            f"{slot.size_bytes:,} in pages of {ALIGNMENT_BYTES:,}; this is a bug in teraio, please report it"
        )
    return Slot(
        name=slot.name,
        size_bytes=end - begin_bytes,
        content_bytes=max(min(end, slot.content_bytes) - begin_bytes, 0),
        extents=tuple(_within(slot.extents, begin_bytes, end)),
        of=slot.of or slot,
        begin_bytes=slot.begin_bytes + begin_bytes,
    )


def in_turns(slot: Slot, begins_bytes: Sequence[int]) -> list[int]:
    """Reorder places in a slot so that its drives take turns. A drive that has no places left is skipped."""
    ends = list(accumulate(extent.length_bytes for extent in slot.extents))
    by_drive: dict[int, list[int]] = {}
    for begin in begins_bytes:
        extent = next(e for e, end in zip(slot.extents, ends, strict=True) if begin < end)
        by_drive.setdefault(extent.drive, []).append(begin)
    return list(alternate(by_drive.values()))


def _within(extents: Sequence[Extent], begin: int, end: int) -> list[Extent]:
    """Return those parts of the extents that lie between two places in their slot."""
    found, first = [], 0
    for extent in extents:
        skipped = max(begin - first, 0)
        length = min(extent.length_bytes, end - first) - skipped
        if length > 0:
            address = None if extent.address is None else extent.address + skipped
            found.append(replace(extent, offset_bytes=extent.offset_bytes + skipped, length_bytes=length, address=address))
        first += extent.length_bytes
    return found


def alternate(lists: Iterable[Sequence[_Item]]) -> Iterator[_Item]:
    """Yield the first item of each list, then the second item of each list, and so on, until all lists are used up."""
    rounds = chain.from_iterable(zip_longest(*([(item,) for item in each] for each in lists)))
    return (entry[0] for entry in rounds if entry is not None)


MoveChunk = Callable[[Slot, Chunk, int], None]  # copies one chunk of a slot, as the calls of a `ChunkIO` do


class ChunkIO(Protocol):
    """Copies single chunks between slots and memory. `address` is the address of the slot's first byte, not of the chunk's."""

    def write_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        """Write one chunk of a slot. Waits until it is written. Raises StorageIOError."""

    def read_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        """Read one chunk of a slot. Waits until it is read. Raises StorageIOError; the memory is undefined then."""


# A copy of a range of a slot that has begun, or that the device has queued. To call it orders the device's next work after the
# copy; if threads make the copy, it waits until that has ended. Raises the StorageError that stopped the copy, StorageIOError if
# a drive no longer answers.
RangeCopy = Callable[[], None]
