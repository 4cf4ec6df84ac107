"""One block of anonymous memory that a file descriptor stands for, so that it can be mapped a second time elsewhere."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

from planner.errors import StorageError, StorageFullError
from runtime.system import on_processors

_FAULT_BYTES = 64 << 20
_MAX_FAULT_THREADS = 8


class Slab:
    """`size_bytes` of main memory, mapped at `address` until `close`. Raises StorageError if the system refuses it."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        try:
            self.descriptor = os.memfd_create("teraio-host")
        except OSError as error:
            raise StorageError(_refused(size_bytes, error)) from error
        try:
            os.ftruncate(self.descriptor, size_bytes)
            self._mapping = mmap.mmap(self.descriptor, size_bytes)
        except OSError as error:
            os.close(self.descriptor)
            raise StorageError(_refused(size_bytes, error)) from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    def prefault(self, processors: frozenset[int] | None) -> None:
        """Take all pages from the system, in several threads that run on `processors`.

        Waits while the kernel clears the pages, which takes seconds for tens of GiB. Raises StorageFullError.
        """

        def touch(offset: int) -> None:
            length = min(_FAULT_BYTES, self.size_bytes - offset)
            with on_processors(processors):
                # Without memory left, fallocate fails; a write to a page would end the process.
                os.posix_fallocate(self.descriptor, offset, length)
                ctypes.memset(self.address + offset, 0, length)

        try:
            with ThreadPoolExecutor(min(_MAX_FAULT_THREADS, os.cpu_count() or 1)) as threads:
                list(threads.map(touch, range(0, self.size_bytes, _FAULT_BYTES)))
        except OSError as error:
            raise StorageFullError(_refused(self.size_bytes, error)) from error

    def close(self) -> None:
        """Give the memory back to the system, unless it is mapped elsewhere too."""
        self._mapping.close()
        os.close(self.descriptor)


def _refused(size: int, error: OSError) -> str:
    return (
        f"the system refuses {size:,} bytes of host memory: [errno {error.errno}] "
        f"{os.strerror(error.errno or errno.ENOMEM)}; lower host_budget, or raise the limits on memory (ulimit -v, "
        "vm.overcommit_memory)"
    )
