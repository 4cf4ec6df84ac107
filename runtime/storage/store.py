"""What the storage tier is to the rest of the runtime: slots in preallocated files, and who hands them
out."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Protocol

ALIGNMENT_BYTES = max(4096, mmap.PAGESIZE)
"""Offsets and sizes in spill files, and addresses in memory, are multiples of this: direct I/O and mmap need
it."""


def align_up(size_bytes: int) -> int:
    """The least multiple of ALIGNMENT_BYTES that is not below `size_bytes`."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A contiguous, aligned range of a spill file. The descriptor stays the store's, open for reading and
    writing.

    drive: what it lies on; extents with the same number share a drive. One of `Store.drives`.
    """

    file_descriptor: int
    path: Path
    offset_bytes: int
    length_bytes: int
    drive: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Slot:
    """Room for one block, from `Store.allocate` to `Store.release`. Equal only to itself.

    name: the block, for messages. size_bytes: aligned. content_bytes: of the block itself; stores of device memory touch
    no more of it. extents: in the order of the block's bytes; as long as `size_bytes`. of: the slot that this one is a range
    of, see `runtime.storage.slot_range`; a range is not released.
    """

    name: str
    size_bytes: int
    content_bytes: int
    extents: tuple[Extent, ...]
    of: Slot | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of a slot that one call reads or writes: where it is in the file, and where in the slot."""

    extent: Extent
    file_offset_bytes: int
    slot_offset_bytes: int
    length_bytes: int


def content_of(slot: Slot, piece: Chunk) -> int:
    """Bytes of the piece that are the block's; what follows, up to the piece's end, only fills the slot."""
    return max(0, min(piece.length_bytes, slot.content_bytes - piece.slot_offset_bytes))


def cut(slot: Slot, piece_bytes: int) -> tuple[Chunk, ...]:
    """`slot` in pieces of `piece_bytes` (aligned) at most, the extents in turns so that all drives have
    work."""
    begins = 0
    by_extent = []
    for extent in slot.extents:
        by_extent.append(_cut_extent(extent, begins, piece_bytes))
        begins += extent.length_bytes
    in_turns = chain.from_iterable(zip_longest(*by_extent))
    return tuple(piece for piece in in_turns if piece is not None)


def _cut_extent(extent: Extent, begins: int, piece_bytes: int) -> Iterator[Chunk]:
    for start in range(0, extent.length_bytes, piece_bytes):
        yield Chunk(
            extent=extent,
            file_offset_bytes=extent.offset_bytes + start,
            slot_offset_bytes=begins + start,
            length_bytes=min(piece_bytes, extent.length_bytes - start),
        )


class Store(Protocol):
    """Hands out slots and carries bytes between them and memory. All calls are safe from several threads.

    Addresses are aligned and point to `slot.size_bytes` bytes, which stay the caller's: nobody may free them,
    nor change those that are being written, until the call has returned. `directories` hold this run's files
    only.
    """

    @property
    def directories(self) -> tuple[Path, ...]:
        """Where this run's files are; gone after `close`."""

    @property
    def drives(self) -> tuple[int, ...]:
        """The drives that extents lie on, each once; a link has a queue for each of them."""

    @property
    def direct(self) -> bool:
        """True if all reads and writes bypass the page cache."""

    @property
    def capacity_bytes(self) -> int:
        """Room that is reserved on the drives, used or not."""

    @property
    def used_bytes(self) -> int:
        """Room that slots take."""

    @property
    def limit_bytes(self) -> int:
        """What `capacity_bytes` can grow to as things are: the storage budget, or what is free on the
        drives."""

    def ensure_capacity(self, size_bytes: int) -> None:
        """Reserve room so that `capacity_bytes` is at least `size_bytes`. Blocks for a moment. Raises
        StorageFullError."""

    def allocate(self, size_bytes: int, name: str) -> Slot:
        """A slot for a block; its content is undefined. Reserves more room where needed, which blocks for a
        moment.

        Raises StorageFullError if there is no room on the drives or in the storage budget.
        """

    def release(self, slot: Slot) -> None:
        """Take a slot back. Nothing may be reading or writing it, nor be mapped over it. Raises StorageError
        if not live."""

    def write(self, slot: Slot, address: int) -> None:
        """Write the whole slot from memory. Blocks. Raises StorageIOError."""

    def read(self, slot: Slot, address: int) -> None:
        """Read the whole slot into memory. Blocks. Raises StorageIOError; the memory is undefined then."""

    def write_piece(self, slot: Slot, piece: Chunk, address: int) -> None:
        """Like `write`, for one piece of a slot whose first byte is at `address`."""

    def read_piece(self, slot: Slot, piece: Chunk, address: int) -> None:
        """Like `read`, for one piece of a slot whose first byte is at `address`."""

    def close(self) -> None:
        """Remove the files. Nothing may be reading or writing. What is mapped stays readable. May be called
        again."""
