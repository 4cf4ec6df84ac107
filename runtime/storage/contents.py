"""What slots hold: sums of pages and hashes of chunks, which tell whether bytes came back different, or need no write at all.

[Note: What a checksum covers]
Every page that an engine writes is summed in memory before the write, and again in memory after it has been read back. So a range
of a slot can be read in other pieces than it was written in. A sum does not protect against an attacker. The sums are kept in
memory, 2 MiB for each GiB, and go when the slot is released.

User code sees a block that is away through a private mapping of its slot: what it writes stays in memory until `Mover` brings it
to the slot, page by page, after the page that was written to was read and compared, see [Note: What user code has touched]. Where
the system does not tell which pages those are, `forget` drops the sums of slots that user code can write to.

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
import functools
import threading
from array import array
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from xxhash import xxh3_128_intdigest

from planner.errors import ChecksumError
from runtime.storage.slots import Chunk, MoveChunk, Slot
from runtime.system import native

# Each page has a sum of 64 bits. Random changes leave one in 2^64 pages with its sum; changes within one word never do.
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Difference:
    """The first page that differs: where it begins, the sum that was noted and the one that was found."""

    offset_bytes: int
    expected: int
    found: int


class PageSums:
    """The sums of the pages of `size_bytes`; a page has none until it is noted.

    Safe from several threads for different pages. Addresses are of memory that the processor can read; offsets are multiples of
    PAGE_BYTES. Both calls let go of the interpreter's lock.
    """

    def __init__(self, size_bytes: int) -> None:
        self._sums = array("Q", bytes(-(-size_bytes // PAGE_BYTES) * 8))
        self._address = self._sums.buffer_info()[0]

    def note(self, offset_bytes: int, address: int, length_bytes: int) -> None:
        """Take the sums of the bytes at `address`, which belong at `offset_bytes`."""
        _library().teraio_sum_pages(address, length_bytes, self._at(offset_bytes))

    def compare(self, offset_bytes: int, address: int, length_bytes: int) -> Difference | None:
        """Compare the bytes at `address` with the sums from `offset_bytes` on."""
        found = ctypes.c_uint64()
        page = _library().teraio_compare_pages(address, length_bytes, self._at(offset_bytes), ctypes.byref(found))
        if page * PAGE_BYTES >= length_bytes:
            return None
        differs = offset_bytes + page * PAGE_BYTES
        return Difference(differs, self._sums[differs // PAGE_BYTES], found.value)

    def _at(self, offset_bytes: int) -> int:
        return self._address + offset_bytes // PAGE_BYTES * 8


class Checksums:
    """Copies chunks by `write` and `read` and checks them, see [Note: What a checksum covers]. Safe from several threads.

    The processor must be able to read the memory at the addresses. Of the user's files, the first read makes the sums.
    """

    def __init__(self, write: MoveChunk, read: MoveChunk) -> None:
        self._write = write
        self._read = read
        self._lock = threading.Lock()
        self._sums: WeakKeyDictionary[Slot, PageSums] = WeakKeyDictionary()

    def write_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        """Sum a chunk, then write it. Waits until it is written. Raises StorageIOError."""
        # Before the write: what memory or the bus spoils on the way is found, too.
        place = slot.begin_bytes + chunk.slot_offset_bytes
        self._sums_of(slot).note(place, address + chunk.slot_offset_bytes, chunk.length_bytes)
        self._write(slot, chunk, address)

    def read_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        """Read a chunk, then compare its sums. Waits until both are done. Raises ChecksumError, StorageIOError."""
        self._read(slot, chunk, address)
        place, sums = slot.begin_bytes + chunk.slot_offset_bytes, self._sums_of(slot)
        difference = sums.compare(place, address + chunk.slot_offset_bytes, chunk.length_bytes)
        if difference is None and slot.file is not None:
            sums.note(place, address + chunk.slot_offset_bytes, chunk.length_bytes)
        if difference is not None:
            raise ChecksumError(
                path=str(chunk.extent.path),
                offset_bytes=chunk.file_offset_bytes + difference.offset_bytes - place,
                block=slot.name,
                expected=difference.expected,
                found=difference.found,
            )

    def forget(self, slot: Slot) -> None:
        """Drop the sums of a slot that something else may have written to. The next read of it is not checked."""
        with self._lock:
            self._sums.pop(slot, None)

    def _sums_of(self, slot: Slot) -> PageSums:
        whole = slot.of or slot
        with self._lock:
            sums = self._sums.get(whole)
            if sums is None:
                sums = self._sums[whole] = PageSums(whole.size_bytes)
            return sums


class UnchangedChunks:
    """Knows which chunks of watched slots need no write, see [Note: Writes that change nothing]. Safe from several threads.

    read: reads a chunk. The processor must be able to read the memory at the addresses.
    """

    def __init__(self, read: MoveChunk) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._known: WeakKeyDictionary[Slot, dict[tuple[int, int], int]] = WeakKeyDictionary()  # of watched slots, by `_place`

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
        watched = self._take(slot, chunk)[0]  # what was known is void: the bytes in memory will be those of this read
        self._read(slot, chunk, address)
        if watched:
            self._put(slot, chunk, _hash(chunk, address))

    def holds(self, slot: Slot, chunk: Chunk, address: int) -> bool:
        """Whether the slot holds these bytes of the memory already; if not, they are going to be written. Waits for the hash."""
        _, known = self._take(slot, chunk)
        if known is None or known != _hash(chunk, address):
            return False
        self._put(slot, chunk, known)
        return True

    def _take(self, slot: Slot, chunk: Chunk) -> tuple[bool, int | None]:
        """Return whether the slot is watched, and what is known of the chunk, which is dropped."""
        with self._lock:
            if slot.of is not None:  # chunks of a range lie elsewhere than those of the whole slot
                self._known.pop(slot.of, None)
                return False, None
            chunks = self._known.get(slot)
            return chunks is not None, chunks.pop(_place(chunk), None) if chunks else None

    def _put(self, slot: Slot, chunk: Chunk, found: int) -> None:
        with self._lock:
            if slot in self._known:
                self._known[slot][_place(chunk)] = found


def _place(chunk: Chunk) -> tuple[int, int]:
    return chunk.slot_offset_bytes, chunk.length_bytes


def _hash(chunk: Chunk, address: int) -> int:
    return xxh3_128_intdigest(chunk.memory(address))


@functools.cache
def _library() -> ctypes.CDLL:
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    functions: dict[str, native.Signature] = {
        "teraio_sum_pages": (None, [pointer, size, pointer]),
        "teraio_compare_pages": (size, [pointer, size, pointer, pointer]),
    }
    return native.load(Path(__file__).with_name("page_sums.cpp"), functions, purpose="checking what comes back")
