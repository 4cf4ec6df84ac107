"""One spill file: opened for direct I/O where the file system allows, grown in preallocated steps."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

from planner.errors import StorageIOError
from runtime.storage.free_space import FreeSpace
from runtime.storage.run_directory import SPILL_SUFFIX
from runtime.storage.store import ALIGNMENT_BYTES, Chunk, Extent, Slot

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class SpillFile:
    """A file in `directory`, with the bookkeeping of what is free in it. Not thread-safe but for `write` and
    `read`.

    drive: files with the same number share one file system, and its free space. direct: let reads and writes bypass
    the page cache, if a real write and read show that the file system can; the attribute tells whether they do.
    Raises OSError if the file cannot be created.
    """

    def __init__(self, directory: Path, *, direct: bool = True) -> None:
        self.path = directory / f"blocks{SPILL_SUFFIX}"
        self.size_bytes = 0
        self.free = FreeSpace()
        # Two descriptors: the C library may preallocate by single bytes, which direct I/O does not take.
        self._buffered = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            descriptor = _open_direct(self.path, self._buffered) if direct else None
        except OSError:
            os.close(self._buffered)
            raise
        self.direct = descriptor is not None
        self._descriptor = self._buffered if descriptor is None else descriptor
        self.drive = os.fstat(self._buffered).st_dev

    @property
    def available_bytes(self) -> int:
        """What the file system has free for this user."""
        system = os.fstatvfs(self._buffered)
        return system.f_bavail * system.f_frsize

    def grow(self, more_bytes: int) -> None:
        """Reserve `more_bytes` (aligned) at the end. Blocks for a moment. Raises OSError; the size is as
        before then."""
        try:
            os.posix_fallocate(self._buffered, self.size_bytes, more_bytes)
        except OSError:
            os.ftruncate(self._buffered, self.size_bytes)
            raise
        self.free.give(self.size_bytes, more_bytes)
        self.size_bytes += more_bytes

    def extent(self, offset_bytes: int, length_bytes: int) -> Extent:
        """A range of this file."""
        return Extent(
            file_descriptor=self._descriptor,
            path=self.path,
            offset_bytes=offset_bytes,
            length_bytes=length_bytes,
            drive=self.drive,
        )

    def close(self) -> None:
        """Close the descriptors. Nothing may be reading or writing."""
        os.close(self._buffered)
        if self.direct:
            os.close(self._descriptor)


def write_piece(slot: Slot, piece: Chunk, address: int) -> None:
    """Write one piece of a slot whose first byte is at `address`. Blocks. Raises StorageIOError."""
    view = _view(piece, address)
    done = 0
    while done < piece.length_bytes:
        try:
            count = os.pwritev(piece.extent.file_descriptor, [view[done:]], piece.file_offset_bytes + done)
        except OSError as error:
            raise _failed("write", slot, piece, error.errno or errno.EIO) from error
        if count == 0:
            raise _failed("write", slot, piece, errno.EIO)
        done += count


def read_piece(slot: Slot, piece: Chunk, address: int) -> None:
    """Read one piece of a slot whose first byte is at `address`. Blocks. Raises StorageIOError, also at a
    file's end."""
    view = _view(piece, address)
    done = 0
    while done < piece.length_bytes:
        try:
            count = os.preadv(piece.extent.file_descriptor, [view[done:]], piece.file_offset_bytes + done)
        except OSError as error:
            raise _failed("read", slot, piece, error.errno or errno.EIO) from error
        if count == 0:
            raise _failed("read beyond the end of the file", slot, piece, errno.EIO)
        done += count


def _view(piece: Chunk, address: int) -> memoryview:
    memory = ctypes.c_char * piece.length_bytes
    return memoryview(memory.from_address(address + piece.slot_offset_bytes))


def _failed(action: str, slot: Slot, piece: Chunk, code: int) -> StorageIOError:
    return StorageIOError(path=str(piece.extent.path), block=slot.name, errno=code, action=action)


def _open_direct(path: Path, buffered: int) -> int | None:
    """A descriptor of a new, empty file for direct I/O, None where a real write and read show that there is
    none."""
    try:
        direct = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError:
        return None
    sent = mmap.mmap(-1, ALIGNMENT_BYTES)
    received = mmap.mmap(-1, ALIGNMENT_BYTES)
    sent.write(os.urandom(ALIGNMENT_BYTES))
    try:
        moved = os.pwritev(direct, [sent], 0), os.preadv(direct, [received], 0)
        works = moved == (ALIGNMENT_BYTES, ALIGNMENT_BYTES) and received[:] == sent[:]
    except OSError:
        works = False
    os.ftruncate(buffered, 0)
    if works:
        return direct
    os.close(direct)
    return None
