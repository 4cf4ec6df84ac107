"""The host tier: slots in one slab of main memory, which a file descriptor stands for so that it can be mapped elsewhere, too."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from planner.errors import StorageError, StorageFullError
from runtime.storage.slots import ALIGNMENT_BYTES, Chunk, Extent, FilePlace, Slot
from runtime.storage.store import FreeSpace, Store
from runtime.system import PIN_CHUNK_BYTES, CudaPinner, HostLimit, check_host_memory, host_limits, on_processors

_PATH = Path("memfd:teraio-host")  # the name of the slab in messages and extents. It is in no file system.
_FAULT_BYTES = 64 << 20
_MAX_FAULT_THREADS = 8

_log = logging.getLogger(__name__)


class HostStore(Store):
    """A `Store` in `size_bytes` of main memory. Its reads and writes are copies that release the interpreter's lock.

    The slab stays at `address`, `capacity_bytes` long, so that a GPU can copy from and to `extent.address` by itself. Its
    pages can also be mapped elsewhere by an extent's descriptor and offset. A block gets several extents if no hole is large
    enough for it.
    No extent crosses a multiple of PIN_CHUNK_BYTES.

    pinner: pins the slab, after all pages were taken from the system, in threads on `processors` (see `processors_near`). If that
    fails, `pinned` is False and a warning says why. None: each page is taken when it is first written.
    limits: of the machine, by default those that hold now.
    Raises StorageFullError if a limit is too low, StorageError if the memory cannot be mapped.
    """

    def __init__(
        self,
        size_bytes: int,
        *,
        processors: frozenset[int] | None = None,
        pinner: CudaPinner | None = None,
        limits: Sequence[HostLimit] | None = None,
    ) -> None:
        super().__init__("host")
        size = size_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if size <= 0:
            raise StorageError(
                f"a host tier of {size_bytes} bytes has no room for a page of {ALIGNMENT_BYTES}; raise host_budget, or "
                "leave it out"
            )
        check_host_memory(size, host_limits() if limits is None else limits)
        self._unpin: weakref.finalize[[int, int], HostStore] | None = None
        try:
            with ExitStack() as undo:
                self._descriptor = os.memfd_create("teraio-host")
                undo.callback(os.close, self._descriptor)
                os.ftruncate(self._descriptor, size)
                mapping = undo.enter_context(mmap.mmap(self._descriptor, size))
                self._open = undo.pop_all()
        except OSError as error:
            raise StorageError(_refused(size, error)) from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        try:
            # No copy of a GPU may cross a multiple of PIN_CHUNK_BYTES.
            free = FreeSpace(self._descriptor, _PATH, address=self.address, piece_bytes=PIN_CHUNK_BYTES)
            self._spaces[self._descriptor] = free
            free.grow(size)
            if pinner is not None:
                self._prefault(processors)
                self._pin(pinner)
        except BaseException:
            self.close()
            raise

    @property
    def pinned(self) -> bool:
        """True if the slab is pinned."""
        return self._unpin is not None

    @property
    def limit_bytes(self) -> int:
        self._check_open()
        return self.capacity_bytes

    def ensure_capacity(self, size_bytes: int) -> None:
        self._check_open()
        if size_bytes > self.capacity_bytes:
            raise StorageFullError(
                f"{size_bytes:,} bytes are needed in host memory, but the host_budget allows {self.capacity_bytes:,}; raise "
                "host_budget, or give storage"
            )

    def write_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        self._check_owned(slot, chunk.extent)
        ctypes.memmove(self.address + chunk.file_offset_bytes, address + chunk.slot_offset_bytes, chunk.length_bytes)

    def read_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        self._check_owned(slot, chunk.extent)
        ctypes.memmove(address + chunk.slot_offset_bytes, self.address + chunk.file_offset_bytes, chunk.length_bytes)

    def _check_owned(self, slot: Slot, extent: Extent) -> None:
        """Raise StorageError for a slot of another store."""
        self._check_open()
        if extent.file_descriptor != self._descriptor:  # its offsets could lead anywhere in this process's memory
            raise StorageError(f"the slot of block {slot.name!r} is not of this store; this is a bug in teraio, please report it")

    # -- for Store, which holds the lock

    def _make_room(self, size_bytes: int, name: str) -> list[int]:
        free = self._free_bytes
        if size_bytes > free:
            raise StorageFullError(
                f"block {name!r} needs {size_bytes:,} bytes of host memory, but {free:,} of the host_budget of "
                f"{self.capacity_bytes:,} are free; raise host_budget, or give storage"
            )
        return [size_bytes]

    def _free_ranges(self, ranges: Sequence[FilePlace]) -> None:
        if self._unpin is None:  # the driver holds pinned pages until all of them are unpinned
            super()._free_ranges(ranges)

    def _free_everything(self) -> None:
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self._open.close()  # gives the memory back to the system, unless it is mapped elsewhere too

    def _pin(self, pinner: CudaPinner) -> None:
        try:
            pinner.pin(self.address, self.capacity_bytes)
        except StorageError as error:
            _log.warning("host memory is not pinned, and copies will be slower: %s", error)
        else:  # also where nobody closes the store: its memory must not be freed before
            self._unpin = weakref.finalize(self, pinner.unpin, self.address, self.capacity_bytes)
            self._unpin.atexit = False

    def _prefault(self, processors: frozenset[int] | None) -> None:
        """Take all pages from the system, in several threads that run on `processors`.

        Waits while the kernel clears the pages, which takes seconds for tens of GiB. Raises StorageFullError.
        """
        size = self.capacity_bytes

        def touch(offset: int) -> None:
            length = min(_FAULT_BYTES, size - offset)
            with on_processors(processors):
                # Without memory left, fallocate fails; a write to a page would end the process.
                os.posix_fallocate(self._descriptor, offset, length)
                ctypes.memset(self.address + offset, 0, length)

        try:
            with ThreadPoolExecutor(min(_MAX_FAULT_THREADS, os.cpu_count() or 1)) as threads:
                list(threads.map(touch, range(0, size, _FAULT_BYTES)))
        except OSError as error:
            raise StorageFullError(_refused(size, error)) from error


def _refused(size: int, error: OSError) -> str:
    return (
        f"the system refuses {size:,} bytes of host memory: [errno {error.errno}] "
        f"{os.strerror(error.errno or errno.ENOMEM)}; lower host_budget, or raise the limits on memory (ulimit -v, "
        "vm.overcommit_memory)"
    )
