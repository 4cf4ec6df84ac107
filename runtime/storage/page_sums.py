"""The sums of a block's pages: what tells that bytes came back different."""

from __future__ import annotations

import ctypes
import functools
from array import array
from dataclasses import dataclass
from pathlib import Path

from runtime.system import native

PAGE_BYTES = 4096
"""Each page has a sum of 64 bits. Random changes leave one in 2^64 pages with its sum; changes within one word never do."""


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


@functools.cache
def _library() -> ctypes.CDLL:
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    functions: dict[str, native.Signature] = {
        "teraio_sum_pages": (None, [pointer, size, pointer]),
        "teraio_compare_pages": (size, [pointer, size, pointer, pointer]),
    }
    return native.load(Path(__file__).with_name("page_sums.cpp"), functions, purpose="checking what comes back")
