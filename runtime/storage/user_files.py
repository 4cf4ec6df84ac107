"""Files of the user that hold blocks, such as the weights of a checkpoint: opened once each, only for reading, and watched.

[Note: Blocks in files]
A block whose bytes lie in a file of the user, such as a frozen weight in its safetensors file, needs no copy in the spill files:
the file is its copy in the storage tier. Its slot is the range of whole pages around these bytes, since direct I/O and mappings
need whole pages; where the block begins in it is the slot's `lead_bytes`. Nothing ever writes to such a slot, and the spill space
knows nothing of it.

As long as a stage or an optimizer has not written the block, its slot is valid, and it leaves without a copy. User code may have
written every block that it can reach, see [Note: User code]. So a block that leaves after user code has run is compared with its
file first, in an I/O thread: by the hashes of [Note: Writes that change nothing] where they are known, otherwise byte by byte.
The "write" of such a slot is this comparison. If bytes differ, it ends with FileDiffers, and the block leaves its file for good:
the next copy out goes to a slot of its own.

The file must stay as it is. Its size and the time of its last change are compared with those at the opening: after each read,
when a region begins, and when another block of the file is made. A file that was only removed, or replaced by another one of its
name, stays usable: it is open, and its bytes are free only when the last of its blocks has gone.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from planner.errors import StorageError, StorageIOError
from runtime.storage.slots import ALIGNMENT_BYTES, Extent, Slot, align_up

# -- descriptors

_OWN: set[int] = set()  # that forked children do not keep: one that outlives its parent would keep the bytes of deleted files


def keep_from_children(descriptor: int) -> None:
    """Replace the descriptor by one of /dev/null in the children that Python forks from now on, until `close_descriptor`.

    Its number stays taken there: a child that writes to it by mistake writes to no other file.
    """
    _OWN.add(descriptor)


def close_descriptor(descriptor: int) -> None:
    """Close a descriptor, also of `keep_from_children`."""
    _OWN.discard(descriptor)
    os.close(descriptor)


def open_direct(descriptor: int, flags: int, works: Callable[[int], bool]) -> int | None:
    """Open an open file again for direct I/O. Return the descriptor; None if the system refuses it, or `works` does."""
    try:
        direct = os.open(f"/proc/self/fd/{descriptor}", flags | os.O_DIRECT)
    except OSError:
        return None
    with suppress(OSError):
        if works(direct):
            return direct
    os.close(direct)
    return None


def _replace_in_child() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in _OWN:
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_replace_in_child)

# -- files

_REMEDY = "leave a checkpoint as it is while its weights are in use; restart from one that nobody changes"

_log = logging.getLogger("teraio")


class FileDiffers(StorageError):
    """Memory holds other bytes than the user's file: the block needs a slot of its own. Never reaches the user."""


class UserFile:
    """One open file, see [Note: Blocks in files]. Its calls are safe from several threads.

    path: as the user gave it. slots: that lie in it. descriptor: for reads and mappings. direct: whether reads bypass the page
    cache. closing: is closed before the descriptor. Raises OSError if the file cannot be opened.
    """

    def __init__(self, path: Path, *, direct: bool) -> None:
        self.path = path
        self.slots: dict[Slot, None] = {}
        self.closing = ExitStack()
        self._told = False
        self.descriptor = os.open(path, os.O_RDONLY)
        found = os.fstat(self.descriptor)
        last = (found.st_size - 1) // ALIGNMENT_BYTES * ALIGNMENT_BYTES

        def reads_last_page(descriptor: int) -> bool:
            with mmap.mmap(-1, ALIGNMENT_BYTES) as page:
                return os.preadv(descriptor, [page], last) == found.st_size - last

        unbuffered = open_direct(self.descriptor, os.O_RDONLY, reads_last_page) if direct and found.st_size else None
        self.direct = unbuffered is not None
        if unbuffered is not None:
            os.close(self.descriptor)
            self.descriptor = unbuffered
        keep_from_children(self.descriptor)
        self.size_bytes, self._changed_ns, self.drive = found.st_size, found.st_mtime_ns, found.st_dev

    def check(self, block: str | None = None) -> None:
        """Raise StorageIOError if the file has changed since it was opened. block: the name of one of its blocks."""
        now = os.fstat(self.descriptor)
        if now.st_size != self.size_bytes:
            found = f"it has {now.st_size:,} bytes now, and had {self.size_bytes:,}"
        elif now.st_mtime_ns != self._changed_ns:
            found = "it was written to"
        else:
            if not now.st_nlink and not self._told:
                self._told = True
                _log.warning(
                    "%s was removed or replaced while weights are read from it: they stay readable, and its bytes are free once "
                    "no weight needs them",
                    self.path,
                )
            return
        name = block or next((slot.name for slot in self.slots), "")
        raise StorageIOError(path=str(self.path), block=name, errno=errno.ESTALE, action=f"read ({found})", remedy=_REMEDY)

    def close(self) -> None:
        """Close the file. Mappings stay readable."""
        self.closing.close()
        close_descriptor(self.descriptor)


class UserFiles:
    """The user's files that hold blocks of one store. Two paths to one file, and one path twice, share its opening.

    Not thread-safe, but for `check`: the store's lock guards it.
    direct: read past the page cache where the file system allows it.
    """

    def __init__(self, *, direct: bool) -> None:
        self._direct = direct
        self._files: dict[tuple[int, int], UserFile] = {}  # by drive and inode

    def slot(self, name: str, path: Path, offset_bytes: int, size_bytes: int) -> Slot:
        """Return a slot for the block whose bytes lie in the file from an offset on. Reads none of them.

        Raises StorageIOError if the file cannot be opened, has fewer bytes, or has changed since it was opened first.
        """
        try:
            file = self._opened(path)
        except OSError as error:
            raise StorageIOError(
                path=str(path),
                block=name,
                errno=error.errno or errno.EIO,
                action="open the file of",
                remedy="give the path of a checkpoint that this process may read",
            ) from error
        try:
            file.check(name)
            end = offset_bytes + size_bytes
            if not 0 <= offset_bytes < end <= file.size_bytes:
                raise StorageIOError(
                    path=str(path),
                    block=name,
                    errno=errno.EINVAL,
                    action=f"read bytes {offset_bytes:,} to {end:,} (the file has {file.size_bytes:,}) of",
                    remedy="the file was cut, or these places are not its own: get it again",
                )
            slot = _slot(file, name, offset_bytes, size_bytes)
            file.slots[slot] = None
            return slot
        finally:
            self._drop_unused(file)

    def release(self, file: UserFile, slot: Slot) -> None:
        """The slot's block needs the file no more. Close it if no other one does."""
        del file.slots[slot]
        self._drop_unused(file)

    def release_all_but(self, kept: Sequence[Slot]) -> None:
        """Release all slots that are not in `kept`. Nothing may be reading them. Mappings stay readable."""
        for file in list(self._files.values()):
            file.slots = {slot: None for slot in file.slots if slot in kept}
            self._drop_unused(file)

    def check(self) -> None:
        """Raise StorageIOError if one of the files has changed since it was opened. Never reads."""
        for file in list(self._files.values()):
            file.check()

    def _opened(self, path: Path) -> UserFile:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        file = self._files.get((found.st_dev, found.st_ino))
        if file is None:
            file = UserFile(path, direct=self._direct)
            opened = os.fstat(file.descriptor)  # somebody may have put another file in its place meanwhile
            known = self._files.setdefault((opened.st_dev, opened.st_ino), file)
            if known is not file:
                file.close()
                return known
        return file

    def _drop_unused(self, file: UserFile) -> None:
        if not file.slots:
            self._files = {key: each for key, each in self._files.items() if each is not file}
            file.close()


def _slot(file: UserFile, name: str, offset_bytes: int, size_bytes: int) -> Slot:
    lead = offset_bytes % ALIGNMENT_BYTES
    length = align_up(lead + size_bytes)
    extent = Extent(
        file_descriptor=file.descriptor,
        path=file.path,
        offset_bytes=offset_bytes - lead,
        length_bytes=length,
        drive=file.drive,
    )
    return Slot(name=name, size_bytes=length, content_bytes=size_bytes, extents=(extent,), file=file, lead_bytes=lead)
