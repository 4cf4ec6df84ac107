"""The host tier: slots in one slab of main memory, which a descriptor stands for as a file's does for a spill file."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from planner.errors import StorageError, StorageFullError
from runtime.storage.free_space import FreeSpace
from runtime.storage.store import ALIGNMENT_BYTES, Chunk, Extent, Slot, align_up
from runtime.system import PIN_CHUNK_BYTES, HostLimit, Pinner, check_host_memory, host_limits, on_processors

_PATH = Path("memfd:teraio-host")
"""What stands for the slab in messages and extents; it is in no file system."""

_FAULT_BYTES = 64 << 20
_FAULT_THREADS = 8

_log = logging.getLogger(__name__)


class HostStore:
    """A `Store` in `size_bytes` of main memory; "reading" and "writing" are copies without the interpreter's lock.

    The slab is mapped once and stays at `address`, so that a GPU can copy from and to `address_of(extent)` by itself. Its
    pages can also be mapped elsewhere through an extent's descriptor and offset. Blocks are put together from several
    holes if none is large enough; no extent crosses a multiple of PIN_CHUNK_BYTES.

    prefault: take all pages from the system now, in several threads on `processors` (see `runtime.system.numa`), else as they
    are first written to. pinner: pin them (and prefault); if that fails, `pinned` is False and a warning says why.
    limits: what the machine allows, by default what it says now.
    Raises StorageFullError if the machine does not allow so much, StorageError if it cannot be mapped.
    """

    def __init__(
        self,
        size_bytes: int,
        *,
        prefault: bool = False,
        processors: frozenset[int] | None = None,
        pinner: Pinner | None = None,
        limits: Sequence[HostLimit] | None = None,
    ) -> None:
        size = size_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if size <= 0:
            raise StorageError(
                f"a host tier of {size_bytes} bytes has no room for a page of {ALIGNMENT_BYTES}; raise host_budget, or "
                "leave it out"
            )
        check_host_memory(size, host_limits() if limits is None else limits)
        self._size_bytes = size
        self._lock = threading.Lock()
        self._live: set[Slot] = set()
        self._used_bytes = 0
        self._free = FreeSpace()
        self._free.give(0, size)
        self._pinner: Pinner | None = None
        self._closed = False
        self._descriptor, self._mapping = _map_slab(size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        try:
            if prefault or pinner is not None:
                self._prefault(processors)
            if pinner is not None:
                self._pin(pinner)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> int:
        """Where the slab begins in this process's memory; it is `capacity_bytes` long."""
        return self._address

    @property
    def pinned(self) -> bool:
        """True if the slab is pinned."""
        return self._pinner is not None

    def address_of(self, extent: Extent) -> int:
        """Where an extent of this store begins in this process's memory; valid until `close`."""
        return self._address + extent.offset_bytes

    def address_of_slot(self, slot: Slot) -> int | None:
        """Where a slot begins in this process's memory, None if it does not lie there in one piece."""
        address = end = self.address_of(slot.extents[0])
        for extent in slot.extents:
            if self.address_of(extent) != end:
                return None
            end += extent.length_bytes
        return address

    @property
    def directories(self) -> tuple[Path, ...]:
        return ()

    @property
    def drives(self) -> tuple[int, ...]:
        return (0,)

    @property
    def direct(self) -> bool:
        return True  # there is no other copy of it in a cache

    @property
    def capacity_bytes(self) -> int:
        return self._size_bytes

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def limit_bytes(self) -> int:
        self._check_open()
        return self._size_bytes

    def ensure_capacity(self, size_bytes: int) -> None:
        self._check_open()
        if size_bytes > self._size_bytes:
            raise StorageFullError(
                f"{size_bytes:,} bytes are needed in host memory, but the host_budget allows {self._size_bytes:,}; raise "
                "host_budget, or give storage"
            )

    def allocate(self, size_bytes: int, name: str) -> Slot:
        size = align_up(max(size_bytes, 1))
        with self._lock:
            self._check_open()
            free = self._free.free_bytes
            if size > free:
                raise StorageFullError(
                    f"block {name!r} needs {size:,} bytes of host memory, but {free:,} of the host_budget of "
                    f"{self._size_bytes:,} are free; raise host_budget, or give storage"
                )
            slot = Slot(name=name, size_bytes=size, content_bytes=size_bytes, extents=tuple(self._take(size)))
            self._live.add(slot)
            self._used_bytes += size
            return slot

    def release(self, slot: Slot) -> None:
        with self._lock:
            if self._closed:
                return
            if slot not in self._live:
                raise StorageError(
                    f"the slot of block {slot.name!r} is not in use here; this is a bug in teraio, please report it"
                )
            self._live.remove(slot)
            self._used_bytes -= slot.size_bytes
            for extent in slot.extents:
                self._free.give(extent.offset_bytes, extent.length_bytes)

    def write(self, slot: Slot, address: int) -> None:
        self._check_owned(slot, slot.extents)
        for extent in slot.extents:
            ctypes.memmove(self.address_of(extent), address, extent.length_bytes)
            address += extent.length_bytes

    def read(self, slot: Slot, address: int) -> None:
        self._check_owned(slot, slot.extents)
        for extent in slot.extents:
            ctypes.memmove(address, self.address_of(extent), extent.length_bytes)
            address += extent.length_bytes

    def write_piece(self, slot: Slot, piece: Chunk, address: int) -> None:
        self._check_owned(slot, (piece.extent,))
        ctypes.memmove(self._address + piece.file_offset_bytes, address + piece.slot_offset_bytes, piece.length_bytes)

    def read_piece(self, slot: Slot, piece: Chunk, address: int) -> None:
        self._check_owned(slot, (piece.extent,))
        ctypes.memmove(address + piece.slot_offset_bytes, self._address + piece.file_offset_bytes, piece.length_bytes)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._live.clear()
            self._used_bytes = 0
            if self._pinner is not None:
                self._pinner.unpin(self._address, self._size_bytes)
                self._pinner = None
            self._mapping.close()
            os.close(self._descriptor)

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError("the host tier is closed; compile the model again to open a new one")

    def _check_owned(self, slot: Slot, extents: Sequence[Extent]) -> None:
        """Another store's offsets would lead anywhere in this process's memory."""
        self._check_open()
        if any(extent.file_descriptor != self._descriptor for extent in extents):
            raise StorageError(f"the slot of block {slot.name!r} is not of this store; this is a bug in teraio, please report it")

    def _take(self, size: int) -> list[Extent]:
        """Extents that add up to `size`, from the smallest hole that has room, else from the largest ones (lock held)."""
        extents: list[Extent] = []
        offset = self._free.take(size)
        if offset is not None:
            return self._extents(offset, size)
        while size:
            taken = self._free.take_largest(size)
            if taken is None:
                raise StorageError(f"{size} free bytes are missing; this is a bug in teraio, please report it")
            extents += self._extents(*taken)
            size -= taken[1]
        return extents

    def _extents(self, offset: int, length: int) -> list[Extent]:
        found = []
        while length:
            part = min(length, PIN_CHUNK_BYTES - offset % PIN_CHUNK_BYTES)
            found.append(Extent(file_descriptor=self._descriptor, path=_PATH, offset_bytes=offset, length_bytes=part, drive=0))
            offset, length = offset + part, length - part
        return found

    def _prefault(self, processors: frozenset[int] | None) -> None:
        """Take all pages. Blocks while the kernel clears them, which takes seconds for tens of GiB."""

        def touch(offset: int) -> None:
            length = min(_FAULT_BYTES, self._size_bytes - offset)
            with on_processors(processors):
                os.posix_fallocate(self._descriptor, offset, length)  # fails where a write would end the process
                ctypes.memset(self._address + offset, 0, length)

        try:
            with ThreadPoolExecutor(min(_FAULT_THREADS, os.cpu_count() or 1)) as threads:
                list(threads.map(touch, range(0, self._size_bytes, _FAULT_BYTES)))
        except OSError as error:
            raise StorageFullError(_refused(self._size_bytes, error)) from error

    def _pin(self, pinner: Pinner) -> None:
        try:
            pinner.pin(self._address, self._size_bytes)
        except StorageError as error:
            _log.warning("host memory is not pinned, and copies will be slower: %s", error)
        else:
            self._pinner = pinner


def _map_slab(size: int) -> tuple[int, mmap.mmap]:
    """A descriptor of `size` bytes of anonymous memory, and its mapping."""
    try:
        descriptor = os.memfd_create("teraio-host")
    except OSError as error:
        raise StorageError(_refused(size, error)) from error
    try:
        os.ftruncate(descriptor, size)
        return descriptor, mmap.mmap(descriptor, size)
    except OSError as error:
        os.close(descriptor)
        raise StorageError(_refused(size, error)) from error


def _refused(size: int, error: OSError) -> str:
    return (
        f"the system refuses {size:,} bytes of host memory: [errno {error.errno}] "
        f"{os.strerror(error.errno or errno.ENOMEM)}; lower host_budget, or raise the limits on memory (ulimit -v, "
        "vm.overcommit_memory)"
    )
