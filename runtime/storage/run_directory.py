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
from pathlib import Path

from planner.errors import StorageError
from runtime.system import descriptors

SPILL_SUFFIX = ".spill"
_LOCK_NAME = "lock"
_NAME = re.compile(r"teraio-\d+-[0-9a-f]{16}")
_MAX_ATTEMPTS = 100

_log = logging.getLogger(__name__)


class RunDirectory:
    """A directory `teraio-<pid>-<random>` (mode 0700) under `parent`, see [Note: How a run directory ends].

    It may hold only files that end in SPILL_SUFFIX. Directories of dead runs under `parent` are removed first.
    Raises StorageError if `parent` is no directory, or if it allows no new files or no file locks.
    """

    def __init__(self, parent: Path) -> None:
        if not parent.is_dir():
            found = "is not a directory" if parent.exists() else "does not exist"
            raise StorageError(f"storage {str(parent)!r} {found}; create it, or give a directory on a fast drive")
        self._process = os.getpid()
        _warn_of_others(parent)
        try:
            remove_leftovers(parent)
            self.path, self._lock = _create(parent.absolute())
            descriptors.keep_from_children(self._lock)
        except OSError as error:
            raise StorageError(
                f"storage {str(parent)!r} cannot be used: {error.strerror} (errno {error.errno}); "
                "give a directory that you can write to, on a file system with file locks"
            ) from error
        atexit.register(self.remove)

    def remove(self) -> None:
        """Remove the directory and its files. Open files stay usable. Does nothing in a forked child.

        Waits while the file system frees the bytes. If something cannot be removed, logs a warning.
        """
        if os.getpid() != self._process:
            return
        try:
            _delete(self.path)
        except OSError as error:
            _log.warning("cannot remove the spill directory %s: %s; please remove it", self.path, error)

    def close(self) -> None:
        """Remove the directory and release its lock. May be called again."""
        self.remove()
        atexit.unregister(self.remove)
        if self._lock >= 0:
            descriptors.close(self._lock)
            self._lock = -1


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


def remove_leftovers(parent: Path) -> tuple[Path, ...]:
    """Remove the run directories under `parent` that belong to this user and to no living process. Return their paths."""
    removed = []
    for path in _run_directories(parent):
        try:
            dead = _remove_if_dead(path)
        except OSError as error:
            _log.warning("cannot remove the spill directory %s of a dead run: %s; please remove it", path, error)
            continue
        if dead:
            _log.info("removed the spill directory %s, which no process held any more", path)
            removed.append(path)
    return tuple(removed)


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
        directory.rmdir()  # fails unless the directory is empty
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
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
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(lock_path)):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _delete(directory: Path) -> None:
    """Remove the files of a run, its lock last, and then the directory. Other processes may do the same at the same time."""
    try:
        for name in os.listdir(directory):
            if name.endswith(SPILL_SUFFIX):
                (directory / name).unlink(missing_ok=True)
        (directory / _LOCK_NAME).unlink(missing_ok=True)
        directory.rmdir()
    except FileNotFoundError:
        return
