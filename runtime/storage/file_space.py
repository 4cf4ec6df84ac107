"""Room for blocks in preallocated files: one spill file per directory, every block striped over all of them."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from planner.errors import StorageError, StorageFullError, StorageIOError
from runtime.storage import spill_file
from runtime.storage.run_directory import RunDirectory
from runtime.storage.spill_file import SpillFile
from runtime.storage.store import ALIGNMENT_BYTES, Chunk, Extent, Slot, align_up, cut

GROWTH_BYTES = 64 << 20
_PIECE_BYTES = 256 << 20
"""What one call reads or writes at most; the kernel's limit is just below 2 GiB."""


class FileSpace(ABC):
    """What all stores in files share: slots in preallocated files, one in a run directory under each of `directories`.

    A store over files is this and a way to carry a piece there and back.

    A slot is split into as many equal contiguous extents as there are directories. If its files cannot grow,
    it is put together from what holes there are, so that all of the capacity can be used.

    budget_bytes: limit of `capacity_bytes` over all directories, None for no limit but the drives'. direct: use direct
    I/O where the file system has it, and the page cache where not; False: always the page cache.
    Raises StorageError if a directory is missing, given twice or cannot be used.
    """

    def __init__(self, directories: Sequence[str | os.PathLike[str]], *, budget_bytes: int | None, direct: bool = True) -> None:
        parents = [Path(directory).resolve() for directory in directories]
        if not parents or len(set(parents)) < len(parents):
            raise StorageError(f"storage {[str(p) for p in parents]}: give one or several different directories")
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._live: set[Slot] = set()
        self._used_bytes = 0
        with ExitStack() as undo:
            self._runs = [self._open_run(parent, undo) for parent in parents]
            self._files = [self._open_file(run, undo, direct) for run in self._runs]
            self._drives = tuple(dict.fromkeys(file.drive for file in self._files))
            self._by_path = {file.path: file for file in self._files}
            self._open = undo.pop_all()

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
        return tuple(run.path for run in self._runs)

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
    def used_bytes(self) -> int:
        return self._used_bytes

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
            # What one file has more than its share, the others need not have.
            excess = self.capacity_bytes + sum(more) - align_up(size_bytes)
            for index in range(len(more)):
                less = min(more[index], excess)
                more[index] -= less
                excess -= less
            self._grow(more, "all blocks")

    def allocate(self, size_bytes: int, name: str) -> Slot:
        size = align_up(max(size_bytes, 1))
        with self._lock:
            self._check_open()
            shares = self._shares(size)
            try:
                self._grow_for(shares, name)
            except StorageFullError:
                if sum(file.free.free_bytes for file in self._files) < size:
                    raise
                extents = self._gather(size)
            else:
                extents = [_take(file, share) for file, share in zip(self._files, shares, strict=True) if share]
            slot = Slot(name=name, size_bytes=size, content_bytes=size_bytes, extents=tuple(extents))
            self._live.add(slot)
            self._used_bytes += size
            return slot

    def release(self, slot: Slot) -> None:
        with self._lock:
            if not self._files:  # closed: all slots are gone
                return
            if slot not in self._live:
                raise StorageError(
                    f"the slot of block {slot.name!r} is not in use here; this is a bug in teraio, please report it"
                )
            self._live.remove(slot)
            self._used_bytes -= slot.size_bytes
            for extent in slot.extents:
                self._by_path[extent.path].free.give(extent.offset_bytes, extent.length_bytes)

    def write(self, slot: Slot, address: int) -> None:
        for piece in cut(slot, _PIECE_BYTES):
            self.write_piece(slot, piece, address)

    def read(self, slot: Slot, address: int) -> None:
        for piece in cut(slot, _PIECE_BYTES):
            self.read_piece(slot, piece, address)

    @abstractmethod
    def write_piece(self, slot: Slot, piece: Chunk, address: int) -> None: ...

    @abstractmethod
    def read_piece(self, slot: Slot, piece: Chunk, address: int) -> None: ...

    def close(self) -> None:
        with self._lock:
            self._open.close()
            self._files = []
            self._live.clear()
            self._used_bytes = 0

    # -- room (lock held)

    def _check_open(self) -> None:
        if not self._files:
            raise StorageError("the storage tier is closed; compile the model again to open a new one")

    def _shares(self, size: int) -> list[int]:
        """`size` split evenly over the files; what is left over goes where most is free."""
        pages, files = size // ALIGNMENT_BYTES, len(self._files)
        shares = [pages // files * ALIGNMENT_BYTES] * files
        by_room = sorted(range(files), key=lambda index: self._files[index].free.free_bytes, reverse=True)
        for index in by_room[: pages % files]:
            shares[index] += ALIGNMENT_BYTES
        return shares

    def _grow_for(self, shares: Sequence[int], name: str) -> None:
        """Let every file have a hole as large as its share: by a whole step if there is room, else by what is
        missing."""
        missing = [
            share - file.free.tail_bytes(file.size_bytes) if file.free.largest_bytes < share else 0
            for share, file in zip(shares, self._files, strict=True)
        ]
        if not any(missing):
            return
        steps = [max(more, GROWTH_BYTES) if more else 0 for more in missing]
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
                if error.errno in spill_file.NO_ROOM:
                    raise StorageFullError(_no_room(size, file)) from error
                raise StorageIOError(
                    path=str(file.path), block=name, errno=error.errno or 0, action="reserve room for"
                ) from error

    def _shortage(self, more: Sequence[int]) -> str | None:
        """Why the files cannot grow by so much, None if they can."""
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
                return _no_room(needed[file.drive], file)
        return None

    def _gather(self, size: int) -> list[Extent]:
        """Extents that add up to `size`, from the largest holes of all files; so much must be free."""
        extents: list[Extent] = []
        while size:
            file = max(self._files, key=lambda candidate: candidate.free.largest_bytes)
            taken = file.free.take_largest(size)
            if taken is None:
                raise StorageError(f"{size} free bytes are missing; this is a bug in teraio, please report it")
            extents.append(file.extent(*taken))
            size -= taken[1]
        return extents


def _take(file: SpillFile, size: int) -> Extent:
    offset = file.free.take(size)
    if offset is None:
        raise StorageError(f"{file.path} has no hole of {size} bytes; this is a bug in teraio, please report it")
    return file.extent(offset, size)


def _no_room(needed: int, file: SpillFile) -> str:
    return (
        f"{needed:,} more bytes are needed in {file.path.parent.parent}, but its file system has "
        f"{file.available_bytes:,} bytes free; free some, give storage on a larger drive or several "
        "directories, or raise memory_budget"
    )
