"""Slots in preallocated files: one spill file in each storage directory, and every block striped over all of them.

Also the stores that system calls read and write: for host memory, and for device memory by way of buffers.

[Note: Short turns]
A thread that returns from a system call needs the interpreter's lock. If the training thread holds it, because it launches
kernels, Python lets that one go on for the switch interval, 5 ms by default. A thread that copies through small buffers returns
from a call every half millisecond or so: it would spend most of its time waiting. With turns of half a millisecond it does not.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Protocol

import torch

from planner.errors import StorageError, StorageFullError, StorageIOError
from runtime.storage.contents import Checksums
from runtime.storage.slots import ALIGNMENT_BYTES, Chunk, Extent, Slot, align_up, content_of, copy_all, cut_chunk
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
        self._spaces = {file.descriptor: file.free for file in files}
        self.direct = all(file.direct for file in files)
        self.user_files = UserFiles(direct=direct)
        self._open.callback(self.user_files.close)
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
    def drives(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(file.drive for file in self._files.values()))

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
            more = [max(0, share - file.free.size_bytes) for share, file in zip(shares, self._files.values(), strict=True)]
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
        self._check_open()
        return self.user_files.slot(name, path, offset_bytes, size_bytes)

    def release(self, slot: Slot) -> None:
        if slot.file is None:
            super().release(slot)
        elif not self._closed:
            self.user_files.release(slot)

    # -- for Store, which holds the lock

    def _make_room(self, size_bytes: int, name: str) -> list[int]:
        shares = self._shares(size_bytes)
        try:
            self._grow_for(shares, name)
        except StorageFullError:
            if self._free_bytes < size_bytes:  # else the block gets what there is, in more pieces
                raise
        return shares

    def _extents(self, file_descriptor: int, offset_bytes: int, length_bytes: int) -> list[Extent]:
        file = self._files[file_descriptor]
        return [
            Extent(
                file_descriptor=file_descriptor,
                path=file.path,
                offset_bytes=offset_bytes,
                length_bytes=length_bytes,
                drive=file.drive,
            )
        ]

    def _has(self, slot: Slot) -> bool:
        return super()._has(slot) if slot.file is None else slot in slot.file.slots

    def _free_kept(self, slot: Slot) -> None:
        if slot.file is None:
            super()._free_kept(slot)
        else:  # its bytes are the user's
            self.user_files.release(slot)

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
        by_free_bytes = sorted(range(len(files)), key=lambda index: files[index].free.free_bytes, reverse=True)
        for index in by_free_bytes[: pages % len(files)]:
            shares[index] += ALIGNMENT_BYTES
        return shares

    def _grow_for(self, shares: Sequence[int], name: str) -> None:
        """Grow every file until it has a hole as large as its share: by _GROWTH_BYTES if they fit, else by what is missing."""
        missing = [
            share - file.free.tail_bytes if file.free.largest_bytes < share else 0
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


class SpillFile:
    """A file in the directory `parent`, grown in preallocated steps, with its free bytes.

    Not thread-safe: the store's lock guards it.

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
        self.free = FreeSpace()
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
        self.drive = os.fstat(self._buffered).st_dev

    @property
    def available_bytes(self) -> int:
        """Bytes that the file system has free for this user."""
        system = os.fstatvfs(self._buffered)  # `f_bavail`: what is kept for the superuser is not free
        return system.f_bavail * system.f_frsize

    def grow(self, more_bytes: int) -> None:
        """Reserve `more_bytes` (aligned) at the end. Waits for the file system. Raises OSError; then the size stays the same."""
        try:
            os.posix_fallocate(self._buffered, self.free.size_bytes, more_bytes)
        except OSError:
            # Some file systems keep what they had reserved before the drive was full.
            os.ftruncate(self._buffered, self.free.size_bytes)
            raise
        self.free.grow(more_bytes)

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


# -- copies by system calls

_SHORT_TURN_SECONDS = 0.0005


class PosixStore(FileSpace):
    """A `Store` between host memory and the files of a `FileSpace`."""

    def write_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        self._check_readable(slot.of or slot)  # the number of a closed descriptor may be another file's
        copy_all("write", os.pwritev, slot, chunk, address, chunk.length_bytes)

    def read_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        self._check_readable(slot.of or slot)
        if slot.file is not None:
            slot.file.read_chunk(slot, chunk, address)
        else:
            copy_all("read", os.preadv, slot, chunk, address, chunk.length_bytes)


class Copier(Protocol):
    """Copies between device and host memory. Safe from several threads."""

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Return new host memory that the device copies from and to at full rate. It begins at a multiple of ALIGNMENT_BYTES.
        May take some milliseconds."""

    def copy(self, *, target: int, source: int, size_bytes: int) -> Callable[[], None]:
        """Begin to copy between two addresses. Never waits. The caller owns the memory until the copy has ended.

        What is returned waits until all bytes have arrived. May be called again. Raises the error that stopped the copy.
        """


class StagedStore(PosixStore):
    """A `Store` whose addresses are in device memory: `copier` copies between there and buffers, system calls the rest.

    A chunk is copied in parts of at most `buffer_bytes`. Each call has two buffers of this size: the drive works on one of
    them while the device works on the other. Calls that run at the same time have separate buffers, and later calls use these
    again. Small parts cost the training thread more: for each one, a thread asks for the interpreter's lock twice or more.

    The store does not order its copies after kernels. What a call reads or writes on the device must be ready when the call
    begins; it has been read or written when the call returns.

    checksums: check the parts as they go to and from the files, see [Note: What a checksum covers].
    Until `close`, all threads of the process take short turns, see [Note: Short turns].
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        copier: Copier,
        *,
        budget_bytes: int | None,
        buffer_bytes: int = 8 << 20,
        checksums: bool = False,
    ) -> None:
        super().__init__(directories, budget_bytes=budget_bytes)
        # From here on `write_chunk` and `read_chunk` are those of this class.
        write, read = super().write_chunk, super().read_chunk
        checked = Checksums(write, read) if checksums else None
        self._write_part = checked.write_chunk if checked else write
        self._read_part = checked.read_chunk if checked else read
        self._copier = copier
        self._buffer_bytes = align_up(buffer_bytes)
        self._buffers_lock = threading.Lock()
        self._idle: list[tuple[torch.Tensor, torch.Tensor]] = []
        _SHORT_TURNS.begin()
        self._open.callback(_SHORT_TURNS.end)

    def write_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        parts = cut_chunk(chunk, self._buffer_bytes)
        with self._two_buffers() as buffers, ExitStack() as copies:

            def fetch(number: int) -> Callable[[], None]:
                begin, size = content_of(slot, parts[number])
                source = address + parts[number].slot_offset_bytes + begin
                wait = self._copier.copy(target=buffers[number % 2].data_ptr() + begin, source=source, size_bytes=size)
                copies.callback(wait)  # after an error too: the next call uses the buffers again
                return wait

            fetched = fetch(0)
            for number, part in enumerate(parts):
                fetched()
                if number + 1 < len(parts):  # the device fills one buffer while the drive empties the other
                    fetched = fetch(number + 1)
                self._write_part(slot, part, _slot_at(buffers[number % 2], part))

    def read_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        begun: list[Callable[[], None]] = []
        with self._two_buffers() as buffers, ExitStack() as copies:
            for number, part in enumerate(cut_chunk(chunk, self._buffer_bytes)):
                if number >= 2:  # the device may still be emptying this buffer
                    begun[number - 2]()
                buffer = buffers[number % 2]
                self._read_part(slot, part, _slot_at(buffer, part))
                begin, size = content_of(slot, part)
                target = address + part.slot_offset_bytes + begin
                begun.append(self._copier.copy(target=target, source=buffer.data_ptr() + begin, size_bytes=size))
                copies.callback(begun[-1])

    def _free_everything(self) -> None:
        super()._free_everything()
        self._idle.clear()

    @contextmanager
    def _two_buffers(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        with self._buffers_lock:
            pair = self._idle.pop() if self._idle else None
        if pair is None:
            pair = self._copier.buffer(self._buffer_bytes), self._copier.buffer(self._buffer_bytes)
        try:
            yield pair
        finally:
            with self._buffers_lock:
                self._idle.append(pair)


def _slot_at(buffer: torch.Tensor, part: Chunk) -> int:
    """Return where the slot would begin if the buffer were this part of it."""
    return buffer.data_ptr() - part.slot_offset_bytes


class _ShortTurns:
    """The switch interval of the process, short until as many calls of `end` have followed as of `begin`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._before = self._during = 0.0

    def begin(self) -> None:
        with self._lock:
            if self._count == 0:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, _SHORT_TURN_SECONDS))
                self._during = sys.getswitchinterval()  # Python rounds it
            self._count += 1

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            # Somebody else may have set another interval meanwhile: that one stays.
            if self._count == 0 and sys.getswitchinterval() == self._during:
                sys.setswitchinterval(self._before)


_SHORT_TURNS = _ShortTurns()  # one for the process, as its switch interval is
