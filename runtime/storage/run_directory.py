"""A private directory for the files of one run. It is removed when the run ends, or when the next one begins.

[Note: How a run directory ends]
Two things remove it: `close`, and the exit of the interpreter, also after an exception. A signal ends a process as it would
without teraio: a handler of Python that removed files would wait for C code, so that a rank in a collective would not end. What
such a process leaves behind, the next run under the same parent removes: a process holds the locks of its directories as long as
it lives, so a free lock means that the process is gone. Forked children remove nothing, and hold no lock.

By default the directory is closed as soon as its files are open (option `unlink_spill_files`). Then nothing can be left.

[Note: The lock is checked after it is taken]
After a directory is created, and before it is locked, another process may find the lock free and remove the directory. So
every process checks, once it holds the lock, that the path still leads to the locked file. If not, it releases the lock. Then
the creator tries again with another name, and a process that was cleaning up continues with the next directory.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
from contextlib import ExitStack, suppress
from pathlib import Path

from planner.errors import StorageError

SPILL_NAME = "blocks.spill"
_LOCK_NAME = "lock"
_NAME = re.compile(r"teraio-\d+-[0-9a-f]{16}")
_MAX_ATTEMPTS = 100

# Descriptors that forked children do not keep: a child that outlives its parent would keep locks and deleted files.
_OWN: set[int] = set()

_log = logging.getLogger(__name__)


class RunDirectory:
    """A directory `teraio-<pid>-<random>` (mode 0700) under `parent`, see [Note: How a run directory ends].

    It may hold a file SPILL_NAME, and no other. Directories of dead runs under `parent` are removed first.
    Raises StorageError if `parent` is no directory, or if it allows no new files or no file locks.
    """

    def __init__(self, parent: Path) -> None:
        if not parent.is_dir():
            found = "is not a directory" if parent.exists() else "does not exist"
            raise StorageError(f"storage {str(parent)!r} {found}; create it, or give a directory on a fast drive")
        self._process = os.getpid()
        _warn_of_others(parent)
        try:
            _remove_leftovers(parent)
            self.path, self._lock = _create(parent.absolute())
            keep_from_children(self._lock)
        except OSError as error:
            raise StorageError(
                f"storage {str(parent)!r} cannot be used: {error.strerror} (errno {error.errno}); "
                "give a directory that you can write to, on a file system with file locks"
            ) from error
        self._open = True
        atexit.register(self.close)

    def close(self) -> None:
        """Remove the directory with its files, and release its lock. Open files stay usable. May be called again.

        Waits while the file system frees the bytes. If something cannot be removed, logs a warning. Does nothing in a forked
        child: the directory is its parent's.
        """
        if not self._open or os.getpid() != self._process:
            return
        self._open = False
        try:
            _delete(self.path)
        except OSError as error:
            _log.warning("cannot remove the spill directory %s: %s; please remove it", self.path, error)
        atexit.unregister(self.close)
        close_descriptor(self._lock)


def _warn_of_others(parent: Path) -> None:
    """Log a warning if other users could put files of their own in the place of spill files."""
    found = parent.stat()
    if found.st_uid not in (os.geteuid(), 0):
        _log.warning(
            "the user %d owns %s, and can remove or exchange spill files in it: give a storage directory of your own",
            found.st_uid,
            parent,
        )
    elif found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        _log.warning("every user can remove or exchange spill files in %s: chmod +t, or give another storage directory", parent)


def _remove_leftovers(parent: Path) -> None:
    """Remove the run directories under `parent` that belong to this user and to no living process."""
    for path in _run_directories(parent):
        try:
            dead = _remove_if_dead(path)
        except OSError as error:
            _log.warning("cannot remove the spill directory %s of a dead run: %s; please remove it", path, error)
            continue
        if dead:
            _log.info("removed the spill directory %s, which no process held any more", path)


def _remove_if_dead(directory: Path) -> bool:
    """Remove a run directory whose lock is free or gone. Create nothing in it: its owner may be removing it."""
    lock = _take_lock(directory, create=False)
    if lock is not None:
        try:
            _delete(directory)
        finally:
            os.close(lock)
        return True
    try:
        directory.rmdir()  # a run that ended between its two last steps has left it empty
    except OSError as error:
        # Gone: its owner was faster. Not empty: its owner lives, and holds the lock. POSIX allows both numbers for that.
        if error.errno in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _run_directories(parent: Path) -> list[Path]:
    found = []
    for entry in os.scandir(parent):
        try:
            if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    found.append(Path(entry.path))
        except FileNotFoundError:  # its owner has just removed it
            continue
    return found


def _create(parent: Path) -> tuple[Path, int]:
    for _ in range(_MAX_ATTEMPTS):
        path = parent / f"teraio-{os.getpid()}-{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        lock = _take_lock(path, create=True)
        if lock is not None:
            return path, lock
    raise StorageError(f"other processes removed {_MAX_ATTEMPTS} new directories in {parent}; give another storage directory")


def _take_lock(directory: Path, *, create: bool) -> int | None:
    """Lock a run directory, see [Note: The lock is checked after it is taken]. Never waits.

    Return the descriptor that holds the lock, None if another process holds it or the directory is gone.
    """
    lock_path = directory / _LOCK_NAME
    try:
        lock = os.open(lock_path, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o600)
    except FileNotFoundError:
        return None
    with ExitStack() as undo, suppress(BlockingIOError, FileNotFoundError):
        undo.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # While the lock was not held, another process may have found it free and removed the directory.
        if os.path.samestat(os.fstat(lock), os.stat(lock_path)):
            undo.pop_all()
            return lock
    return None


def _delete(directory: Path) -> None:
    """Remove the files of a run, its lock last, and then the directory. Other processes may do the same at the same time."""
    try:
        for name in (SPILL_NAME, _LOCK_NAME):  # the lock last: who finds none takes the run for dead
            (directory / name).unlink(missing_ok=True)
        directory.rmdir()
    except FileNotFoundError:
        return


def keep_from_children(descriptor: int) -> None:
    """Replace the descriptor by one of /dev/null in the children that Python forks from now on, until `close_descriptor`.

    Its number stays taken there: a child that writes to it by mistake writes to no other file.
    """
    _OWN.add(descriptor)


def close_descriptor(descriptor: int) -> None:
    """Close a descriptor, also of `keep_from_children`."""
    _OWN.discard(descriptor)
    os.close(descriptor)


def _replace_in_child() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in _OWN:
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_replace_in_child)
