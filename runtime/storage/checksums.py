"""Finds data that changed on its way to a drive, on the drive, or on its way back.

[Note: What a checksum covers]
Every chunk that an engine writes is hashed in memory before the write, and again in memory after it has been read back.
The hash is XXH3 with 64 bits: it misses one of 2^64 random changes. It does not protect against an attacker.
The checksums are kept in memory and go when the slot is released.

Some chunks are not checked when they are read:
* User code can write to a slot through a mapping of the file. `forget` then drops the slot's checksums.
* A chunk has a checksum only if it was written as this one chunk. When a slot is written in other chunks than before,
  the checksums of all chunks that overlap with the new ones are dropped.
"""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from xxhash import xxh3_64_intdigest

from planner.errors import ChecksumError
from runtime.storage.store import Chunk, ChunkIO, FilePlace, Slot


class Checksums:
    """Copies chunks by `store` and checks them, see [Note: What a checksum covers]. Safe from several threads.

    The processor must be able to read the memory at the addresses.
    """

    def __init__(self, store: ChunkIO) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._sums: WeakKeyDictionary[Slot, dict[FilePlace, int]] = WeakKeyDictionary()

    def write_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        """Hash a chunk, then write it. Waits until it is written. Hashing releases the interpreter's lock.

        Raises StorageIOError.
        """
        found = _hash(chunk, address)
        with self._lock:
            _put(self._sums.setdefault(slot.of or slot, {}), chunk.file_place, found)
        self._store.write_chunk(slot, chunk, address)

    def read_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        """Read a chunk, then compare its hash. Waits until both are done. Raises ChecksumError, StorageIOError."""
        self._store.read_chunk(slot, chunk, address)
        with self._lock:
            expected = self._sums.get(slot.of or slot, {}).get(chunk.file_place)
        if expected is None:
            return
        found = _hash(chunk, address)
        if found != expected:
            raise ChecksumError(
                path=str(chunk.extent.path),
                offset_bytes=chunk.file_offset_bytes,
                block=slot.name,
                expected=expected,
                found=found,
            )

    def forget(self, slot: Slot) -> None:
        """Drop the checksums of a slot that something else may have written to. The next read of it is not checked."""
        with self._lock:
            self._sums.pop(slot, None)


def _put(sums: dict[FilePlace, int], place: FilePlace, found: int) -> None:
    """Add a checksum, and drop those of other places that overlap with it. So no two places in `sums` ever overlap."""
    if place not in sums:
        file, begin, size = place
        for other in [each for each in sums if each[0] == file and each[1] < begin + size and begin < each[1] + each[2]]:
            del sums[other]
    sums[place] = found


def _hash(chunk: Chunk, address: int) -> int:
    return xxh3_64_intdigest(chunk.memory(address))
