"""Finds data that changed on its way to a drive, on the drive, or on its way back.

[Note: What a checksum covers]
Every piece that an engine writes is hashed in memory before it leaves, and again after it has come back: XXH3, 64
bits, which finds all but one in 2^64 random changes, and is no protection against someone who means it. Sums are kept in
memory, with the slot: they go when it is released. A slot that something else may have written to (user code, through
a mapping of the file) has none any more, see `forget`; then what is read is not checked. Nor is a piece that was not
written as one: where a slot is written in other pieces than before, the sums of those that overlap are void.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Protocol
from weakref import WeakKeyDictionary

from xxhash import xxh3_64_intdigest

from planner.errors import ChecksumError
from runtime.storage.store import Chunk, Slot


class MovesPieces(Protocol):
    """The part of a `Store` that carries bytes."""

    def write_piece(self, slot: Slot, piece: Chunk, address: int) -> None: ...
    def read_piece(self, slot: Slot, piece: Chunk, address: int) -> None: ...


_Place = tuple[int, int, int]
"""Where a piece lies: descriptor of the file, offset, bytes."""


class Checksums:
    """Carries pieces as `store` does, and checks them, see [Note: What a checksum covers]. Safe from several threads.

    Addresses must be in memory that the processor can read.
    """

    def __init__(self, store: MovesPieces) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._sums: WeakKeyDictionary[Slot, dict[_Place, int]] = WeakKeyDictionary()

    def write_piece(self, slot: Slot, piece: Chunk, address: int) -> None:
        """Hash a piece, then write it. Blocks; hashing releases the interpreter's lock. Raises StorageIOError."""
        found = _hash(piece, address)
        with self._lock:
            _put(self._sums.setdefault(slot.of or slot, {}), _place(piece), found)
        self._store.write_piece(slot, piece, address)

    def read_piece(self, slot: Slot, piece: Chunk, address: int) -> None:
        """Read a piece, then compare its hash. Blocks. Raises ChecksumError, StorageIOError."""
        self._store.read_piece(slot, piece, address)
        with self._lock:
            expected = self._sums.get(slot.of or slot, {}).get(_place(piece))
        if expected is None:
            return
        found = _hash(piece, address)
        if found != expected:
            raise ChecksumError(
                path=str(piece.extent.path),
                offset_bytes=piece.file_offset_bytes,
                block=slot.name,
                expected=expected,
                found=found,
            )

    def forget(self, slot: Slot) -> None:
        """Something else may have written to the slot: what is read from it next is not checked."""
        with self._lock:
            self._sums.pop(slot, None)


def _place(piece: Chunk) -> _Place:
    return piece.extent.file_descriptor, piece.file_offset_bytes, piece.length_bytes


def _put(sums: dict[_Place, int], place: _Place, found: int) -> None:
    """Note a sum. No two places in `sums` overlap."""
    if place not in sums:
        file, begin, size = place
        for other in [each for each in sums if each[0] == file and each[1] < begin + size and begin < each[1] + each[2]]:
            del sums[other]
    sums[place] = found


def _hash(piece: Chunk, address: int) -> int:
    memory = (ctypes.c_char * piece.length_bytes).from_address(address + piece.slot_offset_bytes)
    return xxh3_64_intdigest(memory)
