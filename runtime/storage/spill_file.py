"""One spill file: opened for direct I/O if the file system allows it, and grown in preallocated steps."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

from runtime.storage.free_space import FreeSpace
from runtime.storage.run_directory import SPILL_SUFFIX
from runtime.storage.store import ALIGNMENT_BYTES, Extent
from runtime.system import descriptors

DRIVE_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of `SpillFile.grow` which say that the drive or the user's quota is used up."""


class SpillFile:
    """A file in `directory`, with its free bytes. Not thread-safe: the store's lock guards it.

    drive: number of the file system. Files with the same number share its free bytes.
    direct: try to bypass the page cache. The attribute tells whether reads and writes do so: a real write and a real read
    at the start show whether the file system allows it.
    Raises OSError if the file cannot be created.
    """

    def __init__(self, directory: Path, *, direct: bool = True) -> None:
        self.path = directory / f"blocks{SPILL_SUFFIX}"
        self.free = FreeSpace()
        # Two descriptors: the C library may preallocate by writing single bytes, which direct I/O refuses.
        self._buffered = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            descriptor = _open_direct(self.path, self._buffered) if direct else None
        except OSError:
            os.close(self._buffered)
            raise
        self.direct = descriptor is not None
        self._descriptor = self._buffered if descriptor is None else descriptor
        for each in {self._buffered, self._descriptor}:
            descriptors.keep_from_children(each)
        self.drive = os.fstat(self._buffered).st_dev

    @property
    def size_bytes(self) -> int:
        """Bytes of the file, all reserved on the drive."""
        return self.free.size_bytes

    @property
    def cut_short(self) -> bool:
        """Whether somebody has made the file shorter. A write behind its end makes it long again, with zeros."""
        known = self.size_bytes  # first: another thread may grow the file meanwhile, and makes it longer before it says so
        return os.fstat(self._buffered).st_size < known

    @property
    def available_bytes(self) -> int:
        """Bytes that the file system has free for this user."""
        system = os.fstatvfs(self._buffered)
        return system.f_bavail * system.f_frsize

    def grow(self, more_bytes: int) -> None:
        """Reserve `more_bytes` (aligned) at the end. Waits for the file system. Raises OSError; then the size stays the same."""
        if self.cut_short:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        try:
            os.posix_fallocate(self._buffered, self.size_bytes, more_bytes)
        except OSError:
            os.ftruncate(self._buffered, self.size_bytes)
            raise
        self.free.grow(more_bytes)

    def extent(self, offset_bytes: int, length_bytes: int) -> Extent:
        """Return a range of this file."""
        return Extent(
            file_descriptor=self._descriptor,
            path=self.path,
            offset_bytes=offset_bytes,
            length_bytes=length_bytes,
            drive=self.drive,
        )

    def close(self) -> None:
        """Close the descriptors. Nothing may be reading or writing."""
        descriptors.close(self._buffered)
        if self.direct:
            descriptors.close(self._descriptor)


def _open_direct(path: Path, buffered: int) -> int | None:
    """Open a new, empty file for direct I/O, and try a write and a read. Return the descriptor, None if they do not work."""
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
