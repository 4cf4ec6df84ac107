"""Memory to measure and to try a store with: of whatever kind the addresses are that the store is given."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class DeviceBuffer(Protocol):
    """Some memory of a device, aligned for the stores that serve it. Both calls block until the bytes have moved."""

    @property
    def address(self) -> int:
        """Of its first byte; what a store is given."""

    def write(self, offset_bytes: int, content: bytes) -> None:
        """Put `content` there."""

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """What is there."""


class DeviceMemory(Protocol):
    """Where the addresses point that an engine is given."""

    @property
    def on_host(self) -> bool:
        """True if the processor can read them."""

    def allocate(self, size_bytes: int) -> AbstractContextManager[DeviceBuffer]:
        """A buffer, until the context is left. Raises MemoryError or whatever the device raises where none is left."""


class HostMemory:
    """Ordinary memory: what the CPU device tier consists of."""

    on_host = True

    @contextmanager
    def allocate(self, size_bytes: int) -> Iterator[HostBuffer]:
        """Whole pages from the system; they go back when the context is left."""
        with mmap.mmap(-1, size_bytes) as memory:
            buffer = HostBuffer(memory)
            try:
                yield buffer
            finally:
                buffer.let_go()


class HostBuffer:
    """A `DeviceBuffer` in an anonymous mapping."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._first = ctypes.c_char.from_buffer(memory)
        self.address = ctypes.addressof(self._first)

    def write(self, offset_bytes: int, content: bytes) -> None:
        self._memory[offset_bytes : offset_bytes + len(content)] = content

    def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        return self._memory[offset_bytes : offset_bytes + length_bytes]

    def let_go(self) -> None:
        """Let the mapping be closed; the address is void afterwards."""
        del self._first
