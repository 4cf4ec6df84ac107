"""Finds data that changed on its way to a drive, on the drive, or on its way back.

[Note: What a checksum covers]
Every page that an engine writes is summed in memory before the write, and again in memory after it has been read back. So a range
of a slot can be read in other pieces than it was written in. A sum does not protect against an attacker. The sums are kept in
memory, 2 MiB for each GiB, and go when the slot is released.

User code sees a block that is away through a private mapping of its slot: what it writes stays in memory until `Mover` brings it
to the slot, page by page, after the page that was written to was read and compared, see [Note: What user code has touched]. Where
the system does not tell which pages those are, `forget` drops the sums of slots that user code can write to.
"""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from planner.errors import ChecksumError
from runtime.storage.page_sums import PageSums
from runtime.storage.store import Chunk, ChunkIO, Slot


class Checksums:
    """Copies chunks by `store` and checks them, see [Note: What a checksum covers]. Safe from several threads.

    The processor must be able to read the memory at the addresses.
    """

    def __init__(self, store: ChunkIO) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._sums: WeakKeyDictionary[Slot, PageSums] = WeakKeyDictionary()

    def write_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        """Sum a chunk, then write it. Waits until it is written. Raises StorageIOError."""
        self._sums_of(slot).note(_place(slot, chunk), address + chunk.slot_offset_bytes, chunk.length_bytes)
        self._store.write_chunk(slot, chunk, address)

    def read_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        """Read a chunk, then compare its sums. Waits until both are done. Raises ChecksumError, StorageIOError."""
        self._store.read_chunk(slot, chunk, address)
        place = _place(slot, chunk)
        difference = self._sums_of(slot).compare(place, address + chunk.slot_offset_bytes, chunk.length_bytes)
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


def _place(slot: Slot, chunk: Chunk) -> int:
    """Return where the chunk begins in its slot, or in the slot that this is a range of."""
    begin = 0
    for extent in (slot.of or slot).extents:
        within = chunk.file_offset_bytes - extent.offset_bytes
        if extent.file_descriptor == chunk.extent.file_descriptor and 0 <= within < extent.length_bytes:
            return begin + within
        begin += extent.length_bytes
    raise ValueError(f"{chunk} is not of {slot}")
