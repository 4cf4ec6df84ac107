"""The device tier on CPU: ordinary memory whose pages leave for the spill files and come back at the same address.

[Note: Pages leave, addresses stay]
A block that leaves keeps its address range. Its pages are written to its slot; then the slot is mapped over the address range
(`mmap(MAP_FIXED | MAP_SHARED)`). Code that still reads or writes this memory -- a view, a detached alias, an optimizer --
reads and writes the slot through the page cache. That is slower, but it never sees old data and never crashes. When the block
comes back, its slot is read into other pages, and `mremap` moves these pages over the address range.

This needs memory whose pages belong to nobody else. So `page_pool.cpp` replaces PyTorch's CPU allocator. Pages that a block
gives up are used for the next block. The kernel then neither clears nor maps new pages during training, which also makes
training without a budget faster. One kind of block is different: if another thread of the user may be reading the block (a
parameter), its pages go back to the system, because only then the exchange is atomic.

A block that lies in a file of the user keeps its address, too: its data begins as far behind the border of a page as in the file.
The file is mapped privately, so that nothing that user code writes ever gets there, see [Note: Blocks in files].

[Note: What user code has touched]
With `checksums` or `debug`, the slot that stands in for a block is mapped privately. User code still reads the slot, but what it
writes goes to new pages of its own, and the file stays as teraio wrote it: any other change of it is damage. The kernel tells
which pages of the mapping were touched, and which of them are such new ones (/proc/self/pagemap, for a process of its own without
any privilege). When user code has run, `CpuMover` reads the touched pages of the slot again and compares them; then it brings the
written ones to the slot. So a page that user code has changed in part is one that was whole before.

In the same way `CpuMover` finds out whether user code has written to a block that lies in a file of the user. Such a block gets a
slot of its own, with what the private mapping holds then.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from planner.errors import StorageError, UnsupportedError
from runtime.device import MIN_MOVED_BYTES, Span
from runtime.storage import Extent
from runtime.system import native

_MAX_PAGES = 256
_PRESENT_OR_SWAPPED, _OF_FILE = 6, 1
"""In the highest three bits of a page's entry, see the kernel's page on pagemap."""


class CpuMemory:
    """PyTorch's CPU memory, from the creation of this object until `stand_back`. The process has one pool for all objects.

    No call waits, except that the first object of a process compiles the pool. That takes seconds and is cached on disk.
    Raises UnsupportedError if the pool cannot be compiled, or if another allocator has precedence.
    """

    _users: ClassVar[weakref.WeakSet[CpuMemory]] = weakref.WeakSet()
    """The objects that need PyTorch to allocate from the pool."""

    def __init__(self) -> None:
        self._pool = _load_pool()
        self.take_over()

    def take_over(self) -> None:
        """Serve all CPU allocations of PyTorch from now on."""
        if self._pool.teraio_install(MIN_MOVED_BYTES) != 0:
            raise UnsupportedError(
                "training on CPU needs PyTorch's CPU allocator to be replaced, but another one has been installed with "
                "precedence; leave that one out"
            )
        self._users.add(self)

    def stand_back(self) -> None:
        """Allocate as PyTorch itself does from now on, unless another object of the process still needs the pool.

        Earlier allocations stay valid. All allocations are still counted.
        """
        self._users.discard(self)
        if not self._users:
            self._pool.teraio_stand_back()

    def span(self, storage: torch.UntypedStorage) -> Span | None:
        """Return the pages of `storage`. None: they are not from the pool, or only lent to the storage (by NumPy, say)."""
        if storage.nbytes() < MIN_MOVED_BYTES:
            return None
        serial, lead = ctypes.c_long(), ctypes.c_size_t()
        length = self._pool.teraio_allocation(storage._cdata, ctypes.byref(serial), ctypes.byref(lead))
        return Span(storage.data_ptr() - lead.value, length, serial.value, lead.value) if length else None

    def in_file(self, extent: Extent, lead_bytes: int, size_bytes: int) -> torch.UntypedStorage:
        """Return a new storage over the file of an extent, mapped privately. Takes no memory.

        lead_bytes: where its data begins in the extent.
        """
        storage = torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
        file, offset = extent.file_descriptor, extent.offset_bytes
        _check(self._pool.teraio_map_new(storage._cdata, size_bytes, lead_bytes, file, offset), "mmap", size_bytes)
        return storage

    def adopt(self, storage: torch.UntypedStorage) -> None:
        """Move the data of a large storage into the pool, if it belongs to PyTorch. Aliases of the storage follow.

        Waits until the data is copied. Memory that is only lent to the storage (by NumPy, shared memory, a file) stays.
        """
        lent = not storage.resizable() or storage.is_shared()
        if storage.nbytes() < MIN_MOVED_BYTES or lent or self.span(storage) is not None:
            return
        _check(self._pool.teraio_adopt(storage._cdata), "mmap", storage.nbytes())

    def map_files(
        self, span: Span, extents: Sequence[Extent], *, keep_pages: bool, shared: bool = True, poison: int | None = None
    ) -> None:
        """Map extents in place of the pages of a span. Together they are as long as the span.

        keep_pages: keep the pages for later allocations. A thread that reads the span at this moment may see zeros.
        shared: what is written to the span goes to the files; if not, see [Note: What user code has touched].
        poison: the byte that fills the kept pages once they have left the span.
        """
        count = len(extents)
        files = (ctypes.c_int * count)(*(each.file_descriptor for each in extents))
        offsets = (ctypes.c_size_t * count)(*(each.offset_bytes for each in extents))
        lengths = (ctypes.c_size_t * count)(*(each.length_bytes for each in extents))
        fill = -1 if poison is None else poison
        error = self._pool.teraio_map_files(span.address, count, files, offsets, lengths, keep_pages, shared, fill)
        _check(error, "mmap", span.length_bytes)

    def take_pages(self, length_bytes: int) -> Span:
        """Return pages for `install_pages`, to read a block into. Their content is undefined."""
        address = self._pool.teraio_take(length_bytes)
        _check(errno.ENOMEM if address is None else 0, "mmap", length_bytes)
        return Span(address, length_bytes)

    def install_pages(self, source: Span, target: Span) -> None:
        """Replace the files mapped over `target` by the pages of `source`, in one atomic step. `source` ends."""
        _check(self._pool.teraio_install_pages(source.address, target.address), "mremap", source.length_bytes)

    def bring_in(self, span: Span) -> None:
        """Replace the files mapped over `span` by pages with what is read there. Waits for it."""
        pages = self.take_pages(span.length_bytes)
        ctypes.memmove(pages.address, span.address, span.length_bytes)
        self.install_pages(pages, span)

    def drop_pages(self, span: Span) -> None:
        """Give back the pages of `take_pages`."""
        self._pool.teraio_drop(span.address)

    def trim(self, spare_bytes: int) -> None:
        """Give unused pages back to the system until `spare_bytes` of them are left."""
        self._pool.teraio_trim(max(spare_bytes, 0))

    def forget_cached(self, span: Span) -> None:
        """Remove pages of a file mapping from the resident set, after user code has touched them.

        No data is lost, but for what was written to a mapping that is not shared.
        """
        self._pool.madvise(span.address, span.length_bytes, mmap.MADV_DONTNEED)

    @property
    def kept_bytes(self) -> int:
        """Bytes of unused pages that are kept for later. They belong to the resident set of the process."""
        return int(self._pool.teraio_kept_bytes())

    @property
    def allocated_bytes(self) -> int:
        """Bytes that PyTorch has allocated here and not freed, including blocks that have left."""
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
        "teraio_allocation": (size, [pointer, ctypes.POINTER(ctypes.c_long), sizes]),
        "teraio_map_new": (error_code, [pointer, size, size, error_code, size]),
        "teraio_adopt": (error_code, [pointer]),
        "teraio_map_files": (error_code, [pointer, size, ctypes.POINTER(error_code), sizes, sizes, *[error_code] * 3]),
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
    for number, own in (*zip(found.tolist(), written, strict=True), (-1, False)):  # the last one only ends what comes before
        if number != end or own is not kind or end - begin == _MAX_PAGES:
            if begin < end:
                yield Touched(begin * page, (end - begin) * page, kind)
            begin, kind = number, own
        end = number + 1


@functools.cache
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


def unchanged_since_mapped(address: int, size_bytes: int) -> bool:
    """Whether memory that is a private mapping of a file surely has the file's bytes: nobody has written to its pages."""
    begin = address - address % mmap.PAGESIZE
    length = -(-(address + size_bytes - begin) // mmap.PAGESIZE) * mmap.PAGESIZE
    return system_tells() and not any(each.written for each in touched(begin, length))
