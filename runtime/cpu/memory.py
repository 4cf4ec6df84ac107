"""The device tier on CPU: ordinary memory whose pages leave for the spill files and come back at the same address.

[Note: Pages leave, addresses stay]
A block that leaves keeps its address range. After its pages were written to its slot, the slot is mapped over them
(`mmap(MAP_FIXED | MAP_SHARED)`). Whoever still reads or writes that memory -- a view, a detached alias, an optimizer --
sees and changes the slot through the page cache: slower, but never stale and never a crash. To come back, the slot is
read into other pages, which `mremap` then moves over the range.

That needs memory whose pages are all ours: PyTorch's CPU allocator is `page_pool.cpp` meanwhile. Pages that a block
gives up serve the next one, so the kernel neither hands out nor clears pages while training goes on, which also makes
training without a budget faster. The pages of a block that another thread of the user could be reading (a parameter)
go back to the system instead, because only then the exchange is atomic.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Protocol

import torch

from planner.errors import StorageError, UnsupportedError
from runtime.device import MIN_MOVED_BYTES, Span
from runtime.system import native

PAGE_BYTES = mmap.PAGESIZE


class FileRange(Protocol):
    """A piece of a file, in whole pages."""

    @property
    def file_descriptor(self) -> int: ...
    @property
    def offset_bytes(self) -> int: ...
    @property
    def length_bytes(self) -> int: ...


class CpuMemory:
    """PyTorch's CPU memory, from the making of this object until `stand_back`; there is one pool for the whole process.

    All calls return at once; the first one in a process compiles the pool, which takes seconds and is cached on disk.
    Raises UnsupportedError where it cannot be compiled, or another allocator has precedence.
    """

    _users: ClassVar[weakref.WeakSet[CpuMemory]] = weakref.WeakSet()
    """All that need PyTorch's tensors in the pool."""

    def __init__(self) -> None:
        self._pool = _load_pool()
        self.take_over()

    def take_over(self) -> None:
        """Serve all allocations of PyTorch on CPU from now on."""
        if self._pool.teraio_install(MIN_MOVED_BYTES) != 0:
            raise UnsupportedError(
                "training on CPU needs PyTorch's CPU allocator to be replaced, but another one has been installed with "
                "precedence; leave that one out"
            )
        self._users.add(self)

    def stand_back(self) -> None:
        """Allocate as PyTorch itself does from now on, unless others in the process still need the pool.

        What was allocated meanwhile stays valid, and all that is allocated still counts.
        """
        self._users.discard(self)
        if not self._users:
            self._pool.teraio_stand_back()

    def span(self, storage: torch.UntypedStorage) -> Span | None:
        """The pages of `storage` if they are the pool's and its own (not lent to it, by NumPy say), else None."""
        if storage.nbytes() < MIN_MOVED_BYTES:
            return None
        serial = ctypes.c_long()
        length = self._pool.teraio_chunk(storage._cdata, ctypes.byref(serial))
        return Span(storage.data_ptr(), length, serial.value) if length else None

    def adopt(self, storage: torch.UntypedStorage) -> None:
        """Move the data of a large storage into the pool if it is not there and belongs to PyTorch; its aliases follow.

        Blocks for as long as the copy takes. Memory that is only lent (by NumPy, shared memory, a file) stays put.
        """
        lent = not storage.resizable() or storage.is_shared()
        if storage.nbytes() < MIN_MOVED_BYTES or lent or self.span(storage) is not None:
            return
        _check(self._pool.teraio_adopt(storage._cdata), "mmap", storage.nbytes())

    def map_files(self, span: Span, ranges: Sequence[FileRange], *, keep_pages: bool, poison: int | None = None) -> None:
        """Show the file ranges, together as long as the span, instead of its pages.

        keep_pages: for what is allocated next. A thread that reads the span in that very moment may then see zeros.
        poison: a byte to fill the pages with that are kept, after they have left the span.
        """
        count = len(ranges)
        files = (ctypes.c_int * count)(*(piece.file_descriptor for piece in ranges))
        offsets = (ctypes.c_size_t * count)(*(piece.offset_bytes for piece in ranges))
        lengths = (ctypes.c_size_t * count)(*(piece.length_bytes for piece in ranges))
        fill = -1 if poison is None else poison
        error = self._pool.teraio_map_files(span.address, count, files, offsets, lengths, keep_pages, fill)
        _check(error, "mmap", span.length_bytes)

    def take_pages(self, length_bytes: int) -> Span:
        """Pages to read a block into before `install_pages` puts them in place. Their content is arbitrary."""
        address = self._pool.teraio_take(length_bytes)
        _check(errno.ENOMEM if address is None else 0, "mmap", length_bytes)
        return Span(address, length_bytes)

    def install_pages(self, source: Span, target: Span) -> None:
        """Put the pages of `source` in place of the files mapped over `target`, atomically; `source` is gone afterwards."""
        _check(self._pool.teraio_install_pages(source.address, target.address), "mremap", source.length_bytes)

    def drop_pages(self, span: Span) -> None:
        """Give up what `take_pages` gave."""
        self._pool.teraio_drop(span.address)

    def trim(self, spare_bytes: int) -> None:
        """Give pages that nothing uses back to the system, but for `spare_bytes` of them."""
        self._pool.teraio_trim(max(spare_bytes, 0))

    def forget_cached(self, span: Span) -> None:
        """Take pages of a file mapping out of the resident set again, after user code has touched them; nothing is lost."""
        self._pool.madvise(span.address, span.length_bytes, mmap.MADV_DONTNEED)

    @property
    def kept_bytes(self) -> int:
        """Bytes of free pages that wait for their next use; they are part of the process's resident set."""
        return int(self._pool.teraio_kept_bytes())

    @property
    def allocated_bytes(self) -> int:
        """Bytes that PyTorch has allocated here and not freed, those that are away included."""
        return int(self._pool.teraio_live_bytes())

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self._pool.teraio_reset_peak()

    @property
    def peak_bytes(self) -> int:
        """The highest `allocated_bytes` since the last reset."""
        return int(self._pool.teraio_peak_bytes())


@functools.cache
def _load_pool() -> ctypes.CDLL:
    size, pointer, error_code = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    sizes = ctypes.POINTER(size)
    functions: dict[str, native.Signature] = {
        "teraio_install": (error_code, [size]),
        "teraio_stand_back": (None, []),
        "teraio_chunk": (size, [pointer, ctypes.POINTER(ctypes.c_long)]),
        "teraio_adopt": (error_code, [pointer]),
        "teraio_map_files": (error_code, [pointer, size, ctypes.POINTER(ctypes.c_int), sizes, sizes, ctypes.c_int, ctypes.c_int]),
        "teraio_take": (pointer, [size]),
        "teraio_install_pages": (error_code, [pointer, pointer]),
        "teraio_drop": (None, [pointer]),
        "teraio_trim": (None, [size]),
        "teraio_kept_bytes": (size, []),
        "teraio_live_bytes": (ctypes.c_long, []),
        "teraio_peak_bytes": (ctypes.c_long, []),
        "teraio_reset_peak": (None, []),
        "madvise": (error_code, [pointer, size, ctypes.c_int]),
    }
    return native.load(Path(__file__).with_name("page_pool.cpp"), functions, purpose="training on CPU")


def _check(error: int, call: str, length: int) -> None:
    if error:
        raise StorageError(f"{call} of {length} bytes failed: {os.strerror(error)}; if memory is free, raise vm.max_map_count")
