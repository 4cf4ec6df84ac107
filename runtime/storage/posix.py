"""The store over ordinary files, which system calls read and write from and to host memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from runtime.storage.file_space import FileSpace
from runtime.storage.store import Chunk, Slot, io_error


class PosixStore(FileSpace):
    """A `Store` between host memory and the files of a `FileSpace`."""

    def write_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        self._check_whole("write", slot, chunk)
        _copy("write", os.pwritev, slot, chunk, address)

    def read_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        self._check_whole("read", slot, chunk)
        _copy("read", os.preadv, slot, chunk, address)

    def _check_whole(self, action: str, slot: Slot, chunk: Chunk) -> None:
        """Raise StorageIOError if somebody has cut the file short, StorageError if the store is closed."""
        self._check_open()  # the number of a closed descriptor may be another file's
        if self._by_path[chunk.extent.path].cut_short:
            raise io_error(f"{action} beyond the end of the file", slot, chunk, None)


def _copy(action: str, call: Callable[[int, list[memoryview], int], int], slot: Slot, chunk: Chunk, address: int) -> None:
    """Repeat a system call, which may copy fewer bytes than it is asked for, until the whole chunk is copied.

    Raises StorageIOError.
    """
    view = memoryview((ctypes.c_char * chunk.length_bytes).from_address(address + chunk.slot_offset_bytes))
    done = 0
    while done < chunk.length_bytes:
        try:
            count = call(chunk.extent.file_descriptor, [view[done:]], chunk.file_offset_bytes + done)
        except OSError as error:
            raise io_error(action, slot, chunk, error.errno) from error
        if count == 0:
            raise io_error(f"{action} beyond the end of the file", slot, chunk, None)
        done += count
