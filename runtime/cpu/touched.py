"""Which pages of a file mapping user code has touched.

[Note: What user code has touched]
With `checksums` or `debug`, the slot that stands in for a block is mapped privately. User code still reads the slot, but what it
writes goes to new pages of its own, and the file stays as teraio wrote it: any other change of it is damage. The kernel tells
which pages of the mapping were touched, and which of them are such new ones (/proc/self/pagemap, for a process of its own without
any privilege). When user code has run, `CpuMover` reads the touched pages of the slot again and compares them; then it brings the
written ones to the slot. So a page that user code has changed in part is one that was whole before.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import torch

_MAX_PAGES = 256
_PRESENT_OR_SWAPPED, _OF_FILE = 6, 1
"""In the highest three bits of a page's entry, see the kernel's page on pagemap."""


@dataclass(frozen=True, slots=True)
class Touched:
    """Neighbouring pages, 1 MiB at most if pages have 4 KiB. written: user code wrote to them, so that they are its own."""

    offset_bytes: int
    length_bytes: int
    written: bool


def touched(address: int, length_bytes: int) -> Iterator[Touched]:
    """Yield the pages of a private mapping of files that were touched since they were mapped or forgotten last."""
    page = mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb", buffering=0) as table:
        table.seek(address // page * 8)
        entries = torch.frombuffer(bytearray(table.read(length_bytes // page * 8)), dtype=torch.int64) >> 61
    found = (entries & _PRESENT_OR_SWAPPED).nonzero().flatten()
    written = (entries[found] & _OF_FILE == 0).tolist()
    begin = end = 0
    kind = False
    for number, own in zip(found.tolist(), written, strict=True):
        if number != end or own is not kind or end - begin == _MAX_PAGES:
            if begin < end:
                yield Touched(begin * page, (end - begin) * page, kind)
            begin, kind = number, own
        end = number + 1
    if begin < end:
        yield Touched(begin * page, (end - begin) * page, kind)


def system_tells() -> bool:
    """Whether this system tells what was touched. Some containers do not."""
    page = mmap.PAGESIZE
    with tempfile.TemporaryFile() as file:
        file.write(bytes(3 * page))
        file.flush()
        with mmap.mmap(file.fileno(), 3 * page, flags=mmap.MAP_PRIVATE) as pages:
            pages[0], _ = 1, pages[2 * page]
            first = ctypes.c_char.from_buffer(pages)
            try:
                found = {each.offset_bytes: each.written for each in touched(ctypes.addressof(first), 3 * page)}
            except (OSError, RuntimeError):
                return False
            finally:
                del first
    return found.get(0) is True and found.get(2 * page, found.get(page)) is False
