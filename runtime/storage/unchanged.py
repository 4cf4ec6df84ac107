"""Finds chunks that need no write because their slot holds the same bytes.

[Note: Writes that change nothing]
User code may have written every block that it can reach, see [Note: User code]. Most of the time it has not, and the slot still
holds the block's bytes. So the bytes are hashed when they come from the drive, and again when they would be written: where the
hashes are equal, nothing is written. No kind of write can be missed, because the hash is of the very bytes that would be written.
Both hashes are computed in I/O threads, not in the training thread. The hash is XXH3 with 128 bits.

Hashing is only worth while for slots that were written for nothing once. `watch` names them.

What is known of a chunk is what the file holds. It is dropped when the chunk is read or written again. When a range of its slot
is copied, all that is known of the slot is dropped. While a block is away, user code can write to its slot through a mapping of
the file. The block must be read again before it can be written, and that read brings the hash up to date.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from weakref import WeakKeyDictionary

from xxhash import xxh3_128_intdigest

from planner.errors import ChecksumError
from runtime.storage.store import Chunk, ChunkIO, FilePlace, Slot


class UnchangedChunks:
    """Knows which chunks of watched slots need no write, see [Note: Writes that change nothing]. Safe from several threads.

    store: reads the chunks. The processor must be able to read the memory at the addresses.
    verify: read each chunk that needs no write again, and compare all bytes.
    """

    def __init__(self, store: ChunkIO, *, verify: bool = False) -> None:
        self._store = store
        self._verify = verify
        self._lock = threading.Lock()
        self._known: WeakKeyDictionary[Slot, dict[FilePlace, int]] = WeakKeyDictionary()  # of watched slots

    def watch(self, slot: Slot) -> None:
        """Hash what is read from this slot from now on."""
        with self._lock:
            self._known.setdefault(slot, {})

    def forget(self, slot: Slot) -> None:
        """The slot's block was written: do not compare its next write. Reads are hashed as before."""
        with self._lock:
            if slot in self._known:
                self._known[slot] = {}

    def read_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        """Read a chunk, then hash it if its slot is watched. Waits until both are done. Raises StorageIOError."""
        watched = self._take(slot, chunk)[0]
        self._store.read_chunk(slot, chunk, address)
        if watched:
            self._put(slot, chunk, _hash(chunk, address))

    def holds(self, slot: Slot, chunk: Chunk, address: int) -> bool:
        """Whether the slot holds these bytes of the memory already; if not, they are going to be written. Waits for the hash.

        Raises ChecksumError if `verify` finds that hashes are equal and bytes are not; StorageIOError.
        """
        _, known = self._take(slot, chunk)
        if known is None or known != _hash(chunk, address):
            return False
        if self._verify:
            self._compare(slot, chunk, address)
        self._put(slot, chunk, known)
        return True

    def _take(self, slot: Slot, chunk: Chunk) -> tuple[bool, int | None]:
        """Return whether the slot is watched, and what is known of the chunk, which is dropped."""
        with self._lock:
            if slot.of is not None:  # chunks of a range lie elsewhere than those of the whole slot
                self._known.pop(slot.of, None)
                return False, None
            chunks = self._known.get(slot)
            return chunks is not None, chunks.pop(chunk.file_place, None) if chunks else None

    def _put(self, slot: Slot, chunk: Chunk, found: int) -> None:
        with self._lock:
            if slot in self._known:
                self._known[slot][chunk.file_place] = found

    def _compare(self, slot: Slot, chunk: Chunk, address: int) -> None:
        """Read a chunk again and compare it with the memory."""
        with mmap.mmap(-1, chunk.length_bytes) as pages:
            copy = (ctypes.c_char * chunk.length_bytes).from_buffer(pages)
            self._store.read_chunk(slot, chunk, ctypes.addressof(copy) - chunk.slot_offset_bytes)
            equal = copy.raw == chunk.memory(address).raw
            expected = xxh3_128_intdigest(copy)
            del copy  # the pages can only be closed after it
        if not equal:
            raise ChecksumError(
                path=str(chunk.extent.path),
                offset_bytes=chunk.file_offset_bytes,
                block=slot.name,
                expected=expected,
                found=_hash(chunk, address),
                remedy="what is on the drive is not what was read from it: run again with the option checksums",
            )


def _hash(chunk: Chunk, address: int) -> int:
    return xxh3_128_intdigest(chunk.memory(address))
