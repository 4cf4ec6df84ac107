"""The spill files: one in each storage directory, grown in steps, and every block striped over all of them."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from planner.errors import StorageError, StorageFullError, StorageIOError
from runtime.storage.slots import ALIGNMENT_BYTES, Slot, align_up
from runtime.storage.store import FreeSpace, Store
from runtime.storage.user_files import UserFiles, close_descriptor, keep_from_children, open_direct

# A file grows by at least so many bytes at a time, if they fit: each time costs a wait for the file system.
_GROWTH_BYTES = 64 << 20
_DRIVE_FULL = (errno.ENOSPC, errno.EDQUOT)  # the drive, or the user's quota, is used up


class FileSpace(Store):
    """The base of all stores in files: slots in one preallocated file for each of `directories`.

    A subclass adds the calls that copy a chunk. The files lose their names before the call returns, so nothing is left of them
    however the process ends.

    budget_bytes: limit of `capacity_bytes` over all directories. None: only the drives limit it.
    direct: use direct I/O if the file system allows it, else the page cache. False: always use the page cache. The attribute
    tells whether all reads and writes bypass the page cache.
    user_files: what is known of the user's files that hold blocks, see `slot_in_file`.
    Raises StorageError if a directory is missing, is given twice or cannot be used.
    """

    def __init__(self, directories: Sequence[str | os.PathLike[str]], *, budget_bytes: int | None, direct: bool = True) -> None:
        super().__init__("storage")
        parents = [Path(directory).resolve() for directory in directories]
        if not parents or len(set(parents)) < len(parents):
            raise StorageError(f"storage {[str(p) for p in parents]}: give one or several different directories")
        self._budget_bytes = budget_bytes
        with ExitStack() as undo:
            files = [undo.enter_context(closing(SpillFile(parent, direct=direct))) for parent in parents]
            self._open = undo.pop_all()
        self._files = {file.descriptor: file for file in files}
        self._spaces = {**self._files}
        self.direct = all(file.direct for file in files)
        self.user_files = UserFiles(direct=direct)
        self._open.callback(self.user_files.release_all_but, ())
        try:
            self._open_again()
            for file in files:
                file.path.unlink()
        except BaseException:
            self.close()
            raise

    def _open_again(self) -> None:
        """Open the files in another way too, as long as they have names. By default in none."""

    @property
    def limit_bytes(self) -> int:
        with self._lock:
            self._check_open()
            free = {file.drive: file.available_bytes for file in self._files.values()}
            limit = self.capacity_bytes + sum(free.values())
        return limit if self._budget_bytes is None else min(limit, self._budget_bytes)

    def ensure_capacity(self, size_bytes: int) -> None:
        with self._lock:
            self._check_open()
            shares = self._shares(align_up(size_bytes))
            more = [max(0, share - file.size_bytes) for share, file in zip(shares, self._files.values(), strict=True)]
            # A file that is larger than its share saves the other files that many bytes.
            excess = self.capacity_bytes + sum(more) - align_up(size_bytes)
            for index in range(len(more)):
                less = min(more[index], excess)
                more[index] -= less
                excess -= less
            self._grow(more, "all blocks")

    def slot_in_file(self, name: str, path: Path, offset_bytes: int, size_bytes: int) -> Slot:
        """Return the slot of a block that lies in a file of the user, see [Note: Blocks in files]. Takes no space.

        `release` ends it. Raises StorageIOError if the file cannot be opened, is too short or has changed since it was opened.
        """
        with self._lock:
            self._check_open()
            return self.user_files.slot(name, path, offset_bytes, size_bytes)

    # -- for Store, which holds the lock

    def _make_room(self, size_bytes: int, name: str) -> list[int]:
        shares = self._shares(size_bytes)
        try:
            self._grow_for(shares, name)
        except StorageFullError:
            if self._free_bytes < size_bytes:  # else the block gets what there is, in more pieces
                raise
        return shares

    def _has(self, slot: Slot) -> bool:
        return super()._has(slot) if slot.file is None else slot in slot.file.slots

    def _give_back(self, slot: Slot) -> None:
        if slot.file is None:
            super()._give_back(slot)
        else:  # its bytes are the user's
            self.user_files.release(slot.file, slot)

    def _free_all_but(self, kept: Sequence[Slot]) -> None:
        super()._free_all_but(kept)
        self.user_files.release_all_but(kept)

    def _free_everything(self) -> None:
        self._open.close()
        self._files, self._spaces = {}, {}

    # -- growth (lock held)

    def _shares(self, size: int) -> list[int]:
        """Split `size` evenly over the files. Pages that are left over go to the files with the most free bytes."""
        files = list(self._files.values())
        pages = size // ALIGNMENT_BYTES
        shares = [pages // len(files) * ALIGNMENT_BYTES] * len(files)
        by_free_bytes = sorted(range(len(files)), key=lambda index: files[index].free_bytes, reverse=True)
        for index in by_free_bytes[: pages % len(files)]:
            shares[index] += ALIGNMENT_BYTES
        return shares

    def _grow_for(self, shares: Sequence[int], name: str) -> None:
        """Grow every file until it has a hole as large as its share: by _GROWTH_BYTES if they fit, else by what is missing."""
        missing = [
            share - file.tail_bytes if file.largest_bytes < share else 0
            for share, file in zip(shares, self._files.values(), strict=True)
        ]
        if not any(missing):
            return
        steps = [max(more, _GROWTH_BYTES) if more else 0 for more in missing]
        self._grow(steps if self._shortage(steps) is None else missing, name)

    def _grow(self, more: Sequence[int], name: str) -> None:
        shortage = self._shortage(more)
        if shortage is not None:
            raise StorageFullError(shortage)
        for file, size in zip(self._files.values(), more, strict=True):
            if not size:
                continue
            try:
                file.grow(size)
            except OSError as error:
                if error.errno in _DRIVE_FULL:
                    raise StorageFullError(_drive_full(size, file)) from error
                raise StorageIOError(
                    path=str(file.path), block=name, errno=error.errno or 0, action="reserve room for"
                ) from error

    def _shortage(self, more: Sequence[int]) -> str | None:
        """Return why the files cannot grow by so many bytes, None if they can."""
        total = sum(more)
        wanted = self.capacity_bytes + total
        if self._budget_bytes is not None and total and wanted > self._budget_bytes:
            return (
                f"spill files of {wanted:,} bytes are needed ({self.used_bytes:,} in use), but the "
                f"storage_budget allows {self._budget_bytes:,}; raise storage_budget or memory_budget"
            )
        needed: dict[int, int] = {}
        for file, size in zip(self._files.values(), more, strict=True):
            needed[file.drive] = needed.get(file.drive, 0) + size
            if size and needed[file.drive] > file.available_bytes:
                return _drive_full(needed[file.drive], file)
        return None


class SpillFile(FreeSpace):
    """A file in the directory `parent`, grown in preallocated steps, with its free bytes.

    descriptor: for reads and writes. drive: number of the file system. Files with the same number share its free bytes.
    direct: try to bypass the page cache. The attribute tells whether reads and writes do so: a real write and a real read
    at the start show whether the file system allows it. path: of the file as long as it has a name; for messages.
    Raises StorageError if the file cannot be created.
    """

    def __init__(self, parent: Path, *, direct: bool) -> None:
        if not parent.is_dir():
            found = "is not a directory" if parent.exists() else "does not exist"
            raise StorageError(f"storage {str(parent)!r} {found}; create it, or give a directory on a fast drive")
        self.path = parent / f"teraio-{os.getpid()}-{secrets.token_hex(8)}.spill"
        with ExitStack() as undo:
            undo.callback(self.path.unlink, missing_ok=True)
            try:
                # Two descriptors: the C library may preallocate by writing single bytes, which direct I/O refuses.
                self._buffered = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                undo.callback(os.close, self._buffered)
                unbuffered = open_direct(self._buffered, os.O_RDWR, _carries) if direct else None
                os.ftruncate(self._buffered, 0)
            except OSError as error:
                raise StorageError(
                    f"cannot create a spill file: {error}; give a storage directory that you can write to"
                ) from error
            undo.pop_all()
        self.direct = unbuffered is not None
        self.descriptor = self._buffered if unbuffered is None else unbuffered
        for each in {self._buffered, self.descriptor}:
            keep_from_children(each)
        super().__init__(self.descriptor, self.path, drive=os.fstat(self._buffered).st_dev)

    @property
    def available_bytes(self) -> int:
        """Bytes that the file system has free for this user."""
        system = os.fstatvfs(self._buffered)  # `f_bavail`: what is kept for the superuser is not free
        return system.f_bavail * system.f_frsize

    def grow(self, more_bytes: int) -> None:
        """Reserve `more_bytes` (aligned) at the end. Waits for the file system. Raises OSError; then the size stays the same."""
        try:
            os.posix_fallocate(self._buffered, self.size_bytes, more_bytes)
        except OSError:
            # Some file systems keep what they had reserved before the drive was full.
            os.ftruncate(self._buffered, self.size_bytes)
            raise
        super().grow(more_bytes)

    def close(self) -> None:
        """Remove the file. Nothing may be reading or writing."""
        self.path.unlink(missing_ok=True)
        for each in {self._buffered, self.descriptor}:
            close_descriptor(each)


def _carries(direct: int) -> bool:
    """Whether a page that is written to a new, empty file can be read."""
    # Pages of their own: direct I/O needs aligned addresses.
    sent, received = mmap.mmap(-1, ALIGNMENT_BYTES), mmap.mmap(-1, ALIGNMENT_BYTES)
    sent.write(os.urandom(ALIGNMENT_BYTES))
    moved = os.pwritev(direct, [sent], 0), os.preadv(direct, [received], 0)
    return moved == (ALIGNMENT_BYTES, ALIGNMENT_BYTES) and received[:] == sent[:]


def _drive_full(needed: int, file: SpillFile) -> str:
    return (
        f"{needed:,} more bytes are needed in {file.path.parent}, but its file system has "
        f"{file.available_bytes:,} bytes free; free some, give storage on a larger drive or several "
        "directories, or raise memory_budget"
    )
