"""The device tier on CPU: ordinary memory whose pages leave for the spill files and come back at the same address.

[Note: Pages leave, addresses stay]
A block that leaves keeps its address range. After its whole pages were written to its slot, the slot is mapped over
them (`mmap(MAP_FIXED | MAP_SHARED)`), which gives the anonymous pages back to the operating system. Whoever still
reads or writes that memory -- a view, a detached alias, an optimizer -- sees and changes the slot through the page
cache: slower, but never stale and never a crash. To come back, the slot is read into fresh anonymous pages, which
`mremap` then moves over the range. The partial pages at both ends of a block never move.

That needs every managed tensor to be a memory mapping of its own, so that freeing it unmaps exactly its pages.
glibc does so for allocations above a threshold, which is fixed here; each block's allocation header is checked.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from planner.errors import StorageError, UnsupportedError

PAGE_BYTES = mmap.PAGESIZE
SMALLEST_MOVED_BYTES = 1 << 20
"""Smaller blocks stay on the device: moving them would cost more in system calls than it frees."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_LARGEST_THRESHOLD = 32 << 20  # where glibc's own, growing threshold ends
_MAP_FIXED, _MREMAP_MAYMOVE, _MREMAP_FIXED = 0x10, 1, 2
_HEADER_BYTES, _IS_MMAPPED, _FLAG_BITS = 16, 0x2, 0x7


class FileRange(Protocol):
    """A piece of a file, in whole pages."""

    @property
    def file_descriptor(self) -> int: ...
    @property
    def offset_bytes(self) -> int: ...
    @property
    def length_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Span:
    """Whole pages in memory: page-aligned address and length in bytes."""

    address: int
    length_bytes: int


class CpuMemory:
    """Moves spans between anonymous memory and file mappings. All calls return at once or after a few page faults.

    smallest_bytes: allocations of at least this size become mappings of their own; smaller ones are never moved.
    Raises UnsupportedError where the C library is not glibc, or another allocator stands in front of it.
    """

    _tight: ClassVar[weakref.WeakSet[CpuMemory]] = weakref.WeakSet()
    """All that need glibc's settings, which are the whole process's, to stay tight."""

    def __init__(self, smallest_bytes: int = SMALLEST_MOVED_BYTES) -> None:
        self.smallest_bytes = smallest_bytes
        self._libc = _load_libc()
        self._plugs: list[int] = []
        self._saw_holes = False
        self.tighten()
        probe = torch.empty(2 * smallest_bytes, dtype=torch.uint8)
        if self.span(probe.untyped_storage()) is None:
            raise UnsupportedError(
                "a memory budget on CPU needs glibc's malloc, but tensors come from another allocator; "
                "start without LD_PRELOAD of jemalloc or tcmalloc and without THP_MEM_ALLOC_ENABLE, or leave out memory_budget"
            )

    def tighten(self) -> None:
        """Make every large allocation a mapping of its own from now on."""
        self._tight.add(self)
        # Fixing the threshold also stops glibc from raising it whenever a large block is freed.
        self._libc.mallopt(_M_MMAP_THRESHOLD, self.smallest_bytes)
        self._libc.mallopt(_M_TRIM_THRESHOLD, 64 << 20)
        self._libc.mallopt(_M_MMAP_MAX, 1 << 30)
        self.plug_heap()

    def relax(self) -> None:
        """Nothing has to move: let glibc keep freed memory for reuse, as it does by default, which is faster.

        Has no effect as long as others in the process need it tight.
        """
        self._tight.discard(self)
        if self._tight:
            return
        self._libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
        self._libc.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_THRESHOLD)
        while self._plugs:
            self._libc.free(self._plugs.pop())

    def plug_heap(self) -> None:
        """Make large allocations be mappings again, after the heap has got holes of that size.

        glibc serves an allocation of any size from a hole if there is one. So holes are given back to the operating
        system and then filled with allocations that nobody touches. That costs address space, not memory.
        """
        self._saw_holes = False
        self._libc.malloc_trim(0)
        while True:
            address = self._libc.malloc(self.smallest_bytes)
            if address is None:
                return
            if ctypes.c_size_t.from_address(address - 8).value & _IS_MMAPPED:
                self._libc.free(address)
                return
            self._plugs.append(address)

    def span(self, storage: torch.UntypedStorage) -> Span | None:
        """The whole pages of `storage` if its memory is PyTorch's and a mapping of its own, else None."""
        address, size = storage.data_ptr(), storage.nbytes()
        if size < self.smallest_bytes or not storage.resizable():
            return None  # memory that is not resizable is only lent: its owner (NumPy) may outlive the storage
        if not _is_own_mapping(address, size):
            self._saw_holes = True
            return None
        first = -(-address // PAGE_BYTES) * PAGE_BYTES
        last = (address + size) // PAGE_BYTES * PAGE_BYTES
        return Span(first, last - first)

    def in_place(self, storage: torch.UntypedStorage) -> bool:
        """Whether `storage` can leave as it is, or is too small to leave at all."""
        return storage.nbytes() < self.smallest_bytes or self.span(storage) is not None

    def tidy(self) -> None:
        """Plug the heap again if allocations have come from its holes."""
        if self._saw_holes:
            self.plug_heap()

    def map_files(self, span: Span, ranges: Sequence[FileRange]) -> None:
        """Give the pages of `span` back and show the file ranges there instead; together they are as long as the span."""
        address = span.address
        for piece in ranges:
            self._map(address, piece.length_bytes, mmap.MAP_SHARED | _MAP_FIXED, piece.file_descriptor, piece.offset_bytes)
            address += piece.length_bytes

    def new_pages(self, length_bytes: int) -> Span:
        """Fresh anonymous pages, to read a block into before `move_pages` puts them in place."""
        address = self._map(None, length_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self._libc.madvise(address, length_bytes, mmap.MADV_HUGEPAGE)
        return Span(address, length_bytes)

    def move_pages(self, source: Span, target: Span) -> None:
        """Put the pages of `source` in place of those of `target`, atomically; `source` is gone afterwards."""
        length = source.length_bytes
        moved = self._libc.mremap(source.address, length, length, _MREMAP_MAYMOVE | _MREMAP_FIXED, target.address)
        if moved != target.address:
            raise _os_error("mremap", length)

    def drop_pages(self, span: Span) -> None:
        """Unmap pages that `new_pages` made."""
        if self._libc.munmap(span.address, span.length_bytes) != 0:
            raise _os_error("munmap", span.length_bytes)

    def forget_cached(self, span: Span) -> None:
        """Take pages of a file mapping out of the resident set again, after user code has touched them; nothing is lost."""
        self._libc.madvise(span.address, span.length_bytes, mmap.MADV_DONTNEED)

    def _map(self, address: int | None, length: int, flags: int, descriptor: int, offset: int) -> int:
        result = self._libc.mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset)
        if result in (None, ctypes.c_void_p(-1).value):
            raise _os_error("mmap", length)
        return int(result)


def _is_own_mapping(address: int, size: int) -> bool:
    """Whether the allocation at `address` is a mapping of its own, from the header that glibc keeps before it."""
    if address % PAGE_BYTES < _HEADER_BYTES:
        return False  # not glibc's, and what lies before it may not be readable
    lead = ctypes.c_size_t.from_address(address - 16).value
    head = ctypes.c_size_t.from_address(address - 8).value
    chunk = head & ~_FLAG_BITS
    start = address - _HEADER_BYTES - lead
    fits = lead < PAGE_BYTES and size < chunk <= size + 2 * PAGE_BYTES
    return bool(head & _IS_MMAPPED) and fits and start % PAGE_BYTES == 0 and (chunk + lead) % PAGE_BYTES == 0


def _load_libc() -> ctypes.CDLL:
    if platform.libc_ver()[0] != "glibc":
        raise UnsupportedError(
            f"a memory budget on CPU needs Linux with glibc, this is {platform.system()} {platform.libc_ver()[0]}; "
            "leave out memory_budget, or run on a CUDA device"
        )
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = libc.malloc_trim.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _os_error(call: str, length: int) -> StorageError:
    code = ctypes.get_errno()
    return StorageError(
        f"{call} of {length} bytes failed: {os.strerror(code)}; if memory is free, raise vm.max_map_count"
    )
