"""Aligned memory with an address, for the tests of stores and links."""

from __future__ import annotations

import ctypes
import mmap
import os


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
