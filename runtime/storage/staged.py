"""The store between device memory and another store's files, by way of pinned buffers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from runtime.storage.checksums import MovesPieces
from runtime.storage.store import Chunk, Slot, Store, align_up, content_of, cut

_PIECE_BYTES = 256 << 20


class Pending(Protocol):
    """A copy that has begun."""

    def wait(self) -> None:
        """Block until all bytes have arrived; may be called again. Raises what stopped the copy."""


class HostBuffer(Protocol):
    """Host memory that the device copies from and to at full rate; it lives as long as this object."""

    @property
    def address(self) -> int:
        """Where it begins, a multiple of ALIGNMENT_BYTES."""


class Copier(Protocol):
    """Copies between device and host memory. Safe from several threads; memory stays the caller's, until the wait is over."""

    def buffer(self, size_bytes: int) -> HostBuffer:
        """New host memory. May block for some milliseconds."""

    def to_host(self, target_address: int, source_address: int, size_bytes: int) -> Pending:
        """Begin to copy from the device. Returns at once."""

    def to_device(self, target_address: int, source_address: int, size_bytes: int) -> Pending:
        """Begin to copy to the device. Returns at once."""


class StagedStore:
    """A `Store` whose addresses are in device memory, and whose slots are those of `inner`, a store of host memory.

    A piece is carried in chunks of `buffer_bytes` at most. Each call has two buffers of this size: while one is at the
    drive, the other one is at the device, so pieces should be several times as long. Calls at the same time have buffers
    of their own, which serve later calls again (`staging_bytes` in all). The order of copies and kernels is not its
    concern: what a call reads or writes on the device must be ready when the call is made, and has been read or written
    when it returns.
    `close` closes `inner` too. pieces: what carries chunks to the slots of `inner` and back in its stead, checking them say.
    """

    def __init__(self, inner: Store, copier: Copier, *, buffer_bytes: int = 4 << 20, pieces: MovesPieces | None = None) -> None:
        self._inner = inner
        self._pieces = pieces or inner
        self._copier = copier
        self._buffer_bytes = align_up(buffer_bytes)
        self._lock = threading.Lock()
        self._idle: list[tuple[HostBuffer, HostBuffer]] = []
        self._staging_bytes = 0

    @property
    def staging_bytes(self) -> int:
        """Pinned host memory that buffers take, in use or not."""
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

    def write(self, slot: Slot, address: int) -> None:
        for piece in cut(slot, _PIECE_BYTES):
            self.write_piece(slot, piece, address)

    def read(self, slot: Slot, address: int) -> None:
        for piece in cut(slot, _PIECE_BYTES):
            self.read_piece(slot, piece, address)

    def write_piece(self, slot: Slot, piece: Chunk, address: int) -> None:
        chunks = _chunks(piece, self._buffer_bytes)
        with self._two_buffers() as buffers, ExitStack() as copies:

            def fetch(number: int) -> Pending:
                source = address + chunks[number].slot_offset_bytes
                copy = self._copier.to_host(buffers[number % 2].address, source, content_of(slot, chunks[number]))
                copies.callback(copy.wait)  # also after an error: the buffers serve others then
                return copy

            copy = fetch(0)
            for number, chunk in enumerate(chunks):
                copy.wait()
                if number + 1 < len(chunks):
                    copy = fetch(number + 1)
                self._pieces.write_piece(slot, _alone(chunk), buffers[number % 2].address)

    def read_piece(self, slot: Slot, piece: Chunk, address: int) -> None:
        begun: list[Pending] = []
        with self._two_buffers() as buffers, ExitStack() as copies:
            for number, chunk in enumerate(_chunks(piece, self._buffer_bytes)):
                if number >= 2:
                    begun[number - 2].wait()
                buffer = buffers[number % 2].address
                self._pieces.read_piece(slot, _alone(chunk), buffer)
                copy = self._copier.to_device(address + chunk.slot_offset_bytes, buffer, content_of(slot, chunk))
                copies.callback(copy.wait)
                begun.append(copy)

    def close(self) -> None:
        with self._lock:
            self._idle.clear()
            self._staging_bytes = 0
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


def _chunks(piece: Chunk, chunk_bytes: int) -> list[Chunk]:
    return [
        replace(
            piece,
            file_offset_bytes=piece.file_offset_bytes + begin,
            slot_offset_bytes=piece.slot_offset_bytes + begin,
            length_bytes=min(chunk_bytes, piece.length_bytes - begin),
        )
        for begin in range(0, piece.length_bytes, chunk_bytes)
    ]


def _alone(chunk: Chunk) -> Chunk:
    """The same place in the file, for memory that begins with it."""
    return replace(chunk, slot_offset_bytes=0)
