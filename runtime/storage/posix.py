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
        self._check_open()  # the number of a closed descriptor may be another file's
        _copy("write", os.pwritev, slot, chunk, address, at_end="write")

    def read_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        self._check_open()
        _copy("read", os.preadv, slot, chunk, address, at_end="read beyond the end of the file")


def _copy(
    action: str, call: Callable[[int, list[memoryview], int], int], slot: Slot, chunk: Chunk, address: int, *, at_end: str
) -> None:
    """Repeat a system call, which may copy fewer bytes than it is asked for, until the whole chunk is copied.

    at_end: what failed if the call copies nothing. Raises StorageIOError.
    """
    view = memoryview((ctypes.c_char * chunk.length_bytes).from_address(address + chunk.slot_offset_bytes))
    done = 0
    while done < chunk.length_bytes:
        try:
            count = call(chunk.extent.file_descriptor, [view[done:]], chunk.file_offset_bytes + done)
        except OSError as error:
            raise io_error(action, slot, chunk, error.errno) from error
        if count == 0:
            raise io_error(at_end, slot, chunk, None)
        done += count
