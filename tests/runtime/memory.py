"""Memory and copies for the tests of stores, links and movers: with an address, resident, of whole slots, on bad file systems."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from pathlib import Path

import pytest

from runtime.device import Span
from runtime.storage import ChunkIO, Extent, Slot, cut_slot

_CHUNK_BYTES = 256 << 20


class Memory:
    """Page-aligned anonymous memory, filled with random bytes or zeros."""

    def __init__(self, size_bytes: int, *, random: bool = False) -> None:
        self._map = mmap.mmap(-1, size_bytes)
        self._view = (ctypes.c_char * size_bytes).from_buffer(self._map)
        self.address = ctypes.addressof(self._view)
        if random:
            self.fill()

    def fill(self) -> bytes:
        """Fill the memory with new random bytes and return them."""
        self._map[:] = os.urandom(len(self._map))
        return self.content

    @property
    def content(self) -> bytes:
        return self._map[:]


def write_slot(store: ChunkIO, slot: Slot, address: int) -> None:
    """Write a whole slot from memory, and wait until it is written."""
    for chunk in cut_slot(slot, _CHUNK_BYTES):
        store.write_chunk(slot, chunk, address)


def read_slot(store: ChunkIO, slot: Slot, address: int) -> None:
    """Read a whole slot into memory, and wait until it is read."""
    for chunk in cut_slot(slot, _CHUNK_BYTES):
        store.read_chunk(slot, chunk, address)


COPIES = {"write": write_slot, "read": read_slot}


def flip_a_bit(extent: Extent, offset_bytes: int = 0) -> None:
    """Change a bit of an extent in its file."""
    with open(f"/proc/self/fd/{extent.file_descriptor}", "r+b") as file:
        file.seek(extent.offset_bytes + offset_bytes)
        (before,) = file.read(1)
        file.seek(extent.offset_bytes + offset_bytes)
        file.write(bytes([before ^ 1]))
        os.fsync(file.fileno())


def anonymous_bytes(span: Span) -> int:
    """Return the anonymous resident bytes of the mappings of this process that lie in a span. Exact."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = int(bounds[1], 16), int(bounds[2], 16)
            inside = span.address <= begin and end <= span.address + span.length_bytes
        elif inside and line.startswith("Anonymous:"):
            total += int(line.split()[1]) << 10
    return total


def break_io(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, call, fail)


def refuse_direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the operating system refuse O_DIRECT, as file systems without direct I/O do."""
    real = os.open

    def open_(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument", path)
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", open_)
