"""The store between device memory and another store's files, by way of pinned buffers in host memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from runtime.storage.store import Chunk, ChunkIO, Slot, Store, align_up, content_bytes_of, cut_chunk
from runtime.system import short_turns


class PendingCopy(Protocol):
    """A copy that has begun."""

    def wait(self) -> None:
        """Wait until all bytes have arrived. May be called again. Raises the error that stopped the copy."""


class HostBuffer(Protocol):
    """Host memory that the device copies from and to at full rate. The memory lives as long as this object."""

    @property
    def address(self) -> int:
        """Where the memory begins, a multiple of ALIGNMENT_BYTES."""


class Copier(Protocol):
    """Copies between device and host memory. Safe from several threads. The caller owns the memory until `wait` returns."""

    def buffer(self, size_bytes: int) -> HostBuffer:
        """Return new host memory. May take some milliseconds."""

    def to_host(self, target_address: int, source_address: int, size_bytes: int) -> PendingCopy:
        """Begin to copy from the device. Never waits."""

    def to_device(self, target_address: int, source_address: int, size_bytes: int) -> PendingCopy:
        """Begin to copy to the device. Never waits."""


class StagedStore:
    """A `Store` whose addresses are in device memory. Its slots are those of `inner`, a store of host memory.

    A chunk is copied in parts of at most `buffer_bytes`. Each call has two buffers of this size: the drive works on one of
    them while the device works on the other. So a chunk should be several times as long as a buffer. Calls that run at the
    same time have separate buffers, and later calls use these again (`staging_bytes` in all).

    The store does not order its copies after kernels. What a call reads or writes on the device must be ready when the call
    begins; it has been read or written when the call returns.

    chunk_io: copies the parts to and from the slots of `inner`, `Checksums` for example. By default `inner` does.
    `close` closes `inner` too. Until then, all threads of the process take short turns, see [Note: Short turns].
    """

    def __init__(self, inner: Store, copier: Copier, *, buffer_bytes: int = 4 << 20, chunk_io: ChunkIO | None = None) -> None:
        self._inner = inner
        self._chunk_io = chunk_io or inner
        self._copier = copier
        self._buffer_bytes = align_up(buffer_bytes)
        self._lock = threading.Lock()
        self._idle: list[tuple[HostBuffer, HostBuffer]] = []
        self._staging_bytes = 0
        self._closed = False
        short_turns.begin()

    @property
    def staging_bytes(self) -> int:
        """Pinned host memory of all buffers, in use or not."""
        return self._staging_bytes

    @property
    def directories(self) -> tuple[Path, ...]:
        return self._inner.directories

    @property
    def drives(self) -> tuple[int, ...]:
        return self._inner.drives

    @property
    def direct(self) -> bool:
        return self._inner.direct

    @property
    def capacity_bytes(self) -> int:
        return self._inner.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._inner.used_bytes

    @property
    def limit_bytes(self) -> int:
        return self._inner.limit_bytes

    def ensure_capacity(self, size_bytes: int) -> None:
        self._inner.ensure_capacity(size_bytes)

    def allocate(self, size_bytes: int, name: str) -> Slot:
        return self._inner.allocate(size_bytes, name)

    def release(self, slot: Slot) -> None:
        self._inner.release(slot)

    def write_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        parts = cut_chunk(chunk, self._buffer_bytes)
        with self._two_buffers() as buffers, ExitStack() as copies:

            def fetch(number: int) -> PendingCopy:
                source = address + parts[number].slot_offset_bytes
                copy = self._copier.to_host(buffers[number % 2].address, source, content_bytes_of(slot, parts[number]))
                copies.callback(copy.wait)  # after an error too: the next call uses the buffers again
                return copy

            copy = fetch(0)
            for number, part in enumerate(parts):
                copy.wait()
                if number + 1 < len(parts):
                    copy = fetch(number + 1)
                self._chunk_io.write_chunk(slot, _for_buffer(part), buffers[number % 2].address)

    def read_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        begun: list[PendingCopy] = []
        with self._two_buffers() as buffers, ExitStack() as copies:
            for number, part in enumerate(cut_chunk(chunk, self._buffer_bytes)):
                if number >= 2:
                    begun[number - 2].wait()
                buffer = buffers[number % 2].address
                self._chunk_io.read_chunk(slot, _for_buffer(part), buffer)
                copy = self._copier.to_device(address + part.slot_offset_bytes, buffer, content_bytes_of(slot, part))
                copies.callback(copy.wait)
                begun.append(copy)

    def unlink(self) -> None:
        self._inner.unlink()

    def close(self) -> None:
        with self._lock:
            self._idle.clear()
            self._staging_bytes = 0
            closed, self._closed = self._closed, True
        if not closed:
            short_turns.end()
        self._inner.close()

    @contextmanager
    def _two_buffers(self) -> Iterator[tuple[HostBuffer, HostBuffer]]:
        with self._lock:
            pair = self._idle.pop() if self._idle else None
        if pair is None:
            pair = self._copier.buffer(self._buffer_bytes), self._copier.buffer(self._buffer_bytes)
            with self._lock:
                self._staging_bytes += 2 * self._buffer_bytes
        try:
            yield pair
        finally:
            with self._lock:
                self._idle.append(pair)


def _for_buffer(part: Chunk) -> Chunk:
    """Return the same place in the file, for a buffer that holds nothing but this part."""
    return replace(part, slot_offset_bytes=0)
