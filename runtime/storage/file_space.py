"""Slots in preallocated files: one spill file in each storage directory, and every block striped over all of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from planner.errors import StorageError, StorageFullError, StorageIOError
from runtime.storage.free_space import FreeSpace, take_largest_holes
from runtime.storage.run_directory import RunDirectory
from runtime.storage.slot_store import SlotStore
from runtime.storage.spill_file import DRIVE_FULL, SpillFile
from runtime.storage.store import ALIGNMENT_BYTES, Extent, align_up

_GROWTH_BYTES = 64 << 20
"""A file grows by at least so many bytes at a time, if they fit: each time costs a wait for the file system."""


class FileSpace(SlotStore):
    """The base of all stores in files: slots in one preallocated file for each of `directories`.

    A subclass adds the calls that copy a chunk. The files lie in a run directory under each of `directories`.

    A slot consists of as many equal contiguous extents as there are directories. If the files cannot grow, a slot is put
    together from the largest holes instead, so that all of the capacity can be used.

    budget_bytes: limit of `capacity_bytes` over all directories. None: only the drives limit it.
    direct: use direct I/O if the file system allows it, else the page cache. False: always use the page cache.
    Raises StorageError if a directory is missing, is given twice or cannot be used.
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        *,
        budget_bytes: int | None,
        direct: bool = True,
    ) -> None:
        super().__init__("storage")
        parents = [Path(directory).resolve() for directory in directories]
        if not parents or len(set(parents)) < len(parents):
            raise StorageError(f"storage {[str(p) for p in parents]}: give one or several different directories")
        self._budget_bytes = budget_bytes
        with ExitStack() as undo:
            self._runs = [self._open_run(parent, undo) for parent in parents]
            self._files = [self._open_file(run, undo, direct) for run in self._runs]
            self._drives = tuple(dict.fromkeys(file.drive for file in self._files))
            self._by_path = {file.path: file for file in self._files}
            self._open = undo.pop_all()
        self._named = True

    @staticmethod
    def _open_run(parent: Path, undo: ExitStack) -> RunDirectory:
        run = RunDirectory(parent)
        undo.callback(run.close)
        return run

    @staticmethod
    def _open_file(run: RunDirectory, undo: ExitStack, direct: bool) -> SpillFile:
        try:
            file = SpillFile(run.path, direct=direct)
        except OSError as error:
            raise StorageError(f"cannot create a spill file: {error}; give another storage directory") from error
        undo.callback(file.close)
        return file

    @property
    def directories(self) -> tuple[Path, ...]:
        return tuple(run.path for run in self._runs) if self._named else ()

    @property
    def drives(self) -> tuple[int, ...]:
        return self._drives

    @property
    def direct(self) -> bool:
        return all(file.direct for file in self._files)

    @property
    def capacity_bytes(self) -> int:
        return sum(file.size_bytes for file in self._files)

    @property
    def limit_bytes(self) -> int:
        with self._lock:
            self._check_open()
            drives = {file.drive: file.available_bytes for file in self._files}
            limit = self.capacity_bytes + sum(drives.values())
        return limit if self._budget_bytes is None else min(limit, self._budget_bytes)

    def ensure_capacity(self, size_bytes: int) -> None:
        with self._lock:
            self._check_open()
            shares = self._shares(align_up(size_bytes))
            more = [max(0, share - file.size_bytes) for share, file in zip(shares, self._files, strict=True)]
            # A file that is larger than its share saves the other files that many bytes.
            excess = self.capacity_bytes + sum(more) - align_up(size_bytes)
            for index in range(len(more)):
                less = min(more[index], excess)
                more[index] -= less
                excess -= less
            self._grow(more, "all blocks")

    def unlink(self) -> None:
        self._named = False
        for run in self._runs:
            run.close()

    # -- for SlotStore, which holds the lock

    def _make_room(self, size_bytes: int, name: str) -> list[int]:
        shares = self._shares(size_bytes)
        try:
            self._grow_for(shares, name)
        except StorageFullError:
            if sum(space.free_bytes for space in self._spaces()) < size_bytes:
                raise
        return shares

    def _take_extents(self, shares: Sequence[int]) -> list[Extent]:
        files = list(zip(self._files, shares, strict=True))
        if any(file.free.largest_bytes < share for file, share in files):
            holes = take_largest_holes(self._spaces(), sum(shares))
            return [self._files[index].extent(offset, length) for index, offset, length in holes]
        return [_take(file, share) for file, share in files if share]

    def _spaces(self) -> list[FreeSpace]:
        return [file.free for file in self._files]

    def _space_of(self, extent: Extent) -> FreeSpace:
        return self._by_path[extent.path].free

    def _free_everything(self) -> None:
        self._open.close()
        self._files = []

    # -- growth (lock held)

    def _shares(self, size: int) -> list[int]:
        """Split `size` evenly over the files. Pages that are left over go to the files with the most free bytes."""
        pages, files = size // ALIGNMENT_BYTES, len(self._files)
        shares = [pages // files * ALIGNMENT_BYTES] * files
        by_free_bytes = sorted(range(files), key=lambda index: self._files[index].free.free_bytes, reverse=True)
        for index in by_free_bytes[: pages % files]:
            shares[index] += ALIGNMENT_BYTES
        return shares

    def _grow_for(self, shares: Sequence[int], name: str) -> None:
        """Grow every file until it has a hole as large as its share: by _GROWTH_BYTES if they fit, else by what is missing."""
        missing = [
            share - file.free.tail_bytes if file.free.largest_bytes < share else 0
            for share, file in zip(shares, self._files, strict=True)
        ]
        if not any(missing):
            return
        steps = [max(more, _GROWTH_BYTES) if more else 0 for more in missing]
        self._grow(steps if self._shortage(steps) is None else missing, name)

    def _grow(self, more: Sequence[int], name: str) -> None:
        shortage = self._shortage(more)
        if shortage is not None:
            raise StorageFullError(shortage)
        for file, size in zip(self._files, more, strict=True):
            if not size:
                continue
            try:
                file.grow(size)
            except OSError as error:
                if error.errno in DRIVE_FULL:
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
                f"spill files of {wanted:,} bytes are needed ({self._used_bytes:,} in use), but the "
                f"storage_budget allows {self._budget_bytes:,}; raise storage_budget or memory_budget"
            )
        needed: dict[int, int] = {}
        for file, size in zip(self._files, more, strict=True):
            needed[file.drive] = needed.get(file.drive, 0) + size
            if size and needed[file.drive] > file.available_bytes:
                return _drive_full(needed[file.drive], file)
        return None


def _take(file: SpillFile, size: int) -> Extent:
    offset = file.free.take(size)
    if offset is None:
        raise StorageError(f"{file.path} has no hole of {size} bytes; this is a bug in teraio, please report it")
    return file.extent(offset, size)


def _drive_full(needed: int, file: SpillFile) -> str:
    return (
        f"{needed:,} more bytes are needed in {file.path.parent.parent}, but its file system has "
        f"{file.available_bytes:,} bytes free; free some, give storage on a larger drive or several "
        "directories, or raise memory_budget"
    )
