"""Copies between memory and files by system calls: for host memory, and for device memory by way of buffers.

[Note: Short turns]
A thread that returns from a system call needs the interpreter's lock. If the training thread holds it, because it launches
kernels, Python lets that one go on for the switch interval, 5 ms by default. A thread that copies through small buffers returns
from a call every half millisecond or so: it would spend most of its time waiting. With turns of half a millisecond it does not.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch

from planner.errors import StorageIOError
from runtime.storage.contents import Checksums
from runtime.storage.file_space import FileSpace
from runtime.storage.slots import Chunk, Slot, align_up, content_of, cut_chunk
from runtime.storage.user_files import FileDiffers, UserFile

_COMPARED_BYTES = 1 << 20  # a block is compared with the user's file in pieces of this size
_SHORT_TURN_SECONDS = 0.0005


def io_error(action: str, slot: Slot, chunk: Chunk, code: int | None) -> StorageIOError:
    """Return the error of a chunk that could not be copied. code: the errno, None if the system gave none."""
    return StorageIOError(path=str(chunk.extent.path), block=slot.name, errno=code or errno.EIO, action=action)


def copy_all(
    action: str, call: Callable[[int, list[memoryview], int], int], slot: Slot, chunk: Chunk, address: int, there_bytes: int
) -> None:
    """Repeat a system call, which may copy fewer bytes than it is asked for, until all of the chunk that is there is copied.

    It is always asked for whole pages, as direct I/O needs. Raises StorageIOError.
    """
    view, done = memoryview(chunk.memory(address)), 0
    while done < there_bytes:
        try:
            count = call(chunk.extent.file_descriptor, [view[done:]], chunk.file_offset_bytes + done)
        except OSError as error:
            raise io_error(action, slot, chunk, error.errno) from error
        if count == 0:  # a read finds no bytes there: somebody has made the file shorter
            raise io_error(f"{action} beyond the end of the file", slot, chunk, None)
        done += count


def _read_user_file(file: UserFile, slot: Slot, chunk: Chunk, address: int) -> None:
    """Read a chunk of a slot in a file of the user; zeros beyond the file's end. Raises StorageIOError."""
    view = memoryview(chunk.memory(address)).cast("B")
    there = min(chunk.length_bytes, file.size_bytes - chunk.file_offset_bytes)
    try:
        copy_all("read", os.preadv, slot, chunk, address, there)
        view[there:] = bytes(chunk.length_bytes - there)
    finally:  # where it has changed, this is what went wrong
        file.check(slot.name)


def compare_file(file: UserFile, slot: Slot, chunk: Chunk, address: int, bytes_at: Callable[[int, int], bytes]) -> None:
    """Read the block's bytes of a chunk from a file of the user. Raises FileDiffers if the memory at `address` holds others.

    bytes_at: returns a copy of the memory from an address on, of so many bytes. Raises StorageIOError too.
    """
    with mmap.mmap(-1, min(_COMPARED_BYTES, chunk.length_bytes)) as pages:  # direct I/O needs aligned memory
        begins_at = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        for part in cut_chunk(chunk, len(pages)):
            _read_user_file(file, slot, part, begins_at - part.slot_offset_bytes)
            begin, size = content_of(slot, part)
            if pages[begin : begin + size] != bytes_at(address + part.slot_offset_bytes + begin, size):
                raise FileDiffers(f"block {slot.name!r} differs from its file")


class PosixStore(FileSpace):
    """A `Store` between host memory and the files of a `FileSpace`."""

    def write_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        self._check_readable(slot)  # the number of a closed descriptor may be another file's
        copy_all("write", os.pwritev, slot, chunk, address, chunk.length_bytes)

    def read_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        self._check_readable(slot)
        if slot.file is not None:
            _read_user_file(slot.file, slot, chunk, address)
        else:
            copy_all("read", os.preadv, slot, chunk, address, chunk.length_bytes)


class Copier(Protocol):
    """Copies between device and host memory. Safe from several threads."""

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Return new host memory that the device copies from and to at full rate. It begins at a multiple of ALIGNMENT_BYTES.
        May take some milliseconds."""

    def copy(self, buffer: torch.Tensor, address: int, *, to_device: bool) -> Callable[[], None]:
        """Begin to copy between a part of a buffer and as many bytes of device memory. Never waits. The caller owns the memory
        until the copy has ended.

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
                wait = self._copier.copy(buffers[number % 2][begin : begin + size], source, to_device=False)
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
                begun.append(self._copier.copy(buffer[begin : begin + size], target, to_device=True))
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
