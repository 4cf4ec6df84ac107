"""The store between device memory and files by GPUDirect Storage (cuFile), through KvikIO; the only file that imports it.

[Note: KvikIO and streams]
KvikIO waits for the device's default stream before it begins a copy. Where kernels are queued there, every copy waits for
all of them: stages must run on another stream, as they do under `runtime.cuda.streams`. Threads, task size and the other
settings are the process's; `close` puts them back.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from planner.errors import StorageIOError, UnsupportedError
from runtime.device import DeviceBytes
from runtime.storage.file_space import FileSpace
from runtime.storage.store import Chunk, Slot, content_of

_log = logging.getLogger(__name__)


class KvikioStore(FileSpace):
    """A `Store` whose addresses are in device memory, in the preallocated files of a `FileSpace`.

    threads, task_bytes: KvikIO's pool, which serves all callers; a piece is cut into tasks of this size where KvikIO does
    the copies itself. kvikio: the module, by default the one that is installed.
    `description` tells how bytes travel: by GPUDirect Storage, or through host memory where the drive, the file system or
    the driver does not take part. See [Note: KvikIO and streams].
    Raises UnsupportedError if KvikIO or a driver is missing, StorageError as `FileSpace` does.
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        *,
        budget_bytes: int | None,
        threads: int = 16,
        task_bytes: int = 4 << 20,
        kvikio: Any = None,
    ) -> None:
        self._kvikio = load_kvikio() if kvikio is None else kvikio
        super().__init__(directories, budget_bytes=budget_bytes)
        self._task_bytes = task_bytes
        settings = {
            "num_threads": threads,
            "task_size": task_bytes,
            "bounce_buffer_size": task_bytes,
            "gds_threshold": 0,  # small pieces take the same way as large ones
            "auto_direct_io_read": True,
            "auto_direct_io_write": True,
        }
        try:
            self._open.enter_context(self._kvikio.defaults.set(settings))
            self._handles, way = self._open_files()
        except BaseException:
            self.close()
            raise
        self.description = f"kvikio {self._kvikio.__version__}, {way}"

    @property
    def direct(self) -> bool:
        return all(handle.is_direct_io_supported() for handle in self._handles.values())

    def write_piece(self, slot: Slot, piece: Chunk, address: int) -> None:
        self._check_open()
        self._carry("write", self._handles[piece.extent.path].pwrite, slot, piece, address)

    def read_piece(self, slot: Slot, piece: Chunk, address: int) -> None:
        self._check_open()
        self._carry("read", self._handles[piece.extent.path].pread, slot, piece, address)

    def register_memory(self, address: int, size_bytes: int) -> None:
        """Prepare the allocation that these device addresses are in for many transfers: cuFile then needs no buffer of its
        own between. Blocks. Raises UnsupportedError if the driver refuses it."""
        try:
            self._kvikio.memory_register(DeviceBytes(address, size_bytes))
        except RuntimeError as error:
            raise UnsupportedError(
                f"cuFile cannot register {size_bytes:,} bytes of device memory: {error}; leave them unregistered"
            ) from error

    def unregister_memory(self, address: int, size_bytes: int) -> None:
        """Take `register_memory` back, before the memory is freed."""
        self._kvikio.memory_deregister(DeviceBytes(address, size_bytes))

    def _carry(self, action: str, call: Any, slot: Slot, piece: Chunk, address: int) -> None:
        where = f"at offset {piece.file_offset_bytes:,}"
        size = content_of(slot, piece)
        memory = DeviceBytes(address + piece.slot_offset_bytes, size)
        try:
            moved = call(memory, size, piece.file_offset_bytes, self._task_bytes).get()
        except (RuntimeError, OSError) as error:
            raise _failed(slot, piece, f"{action} {where} ({error})", getattr(error, "errno", None)) from error
        if moved != size:
            raise _failed(slot, piece, f"{action} more than {moved:,} of {size:,} bytes {where}", None)

    def _open_files(self) -> tuple[dict[Any, Any], str]:
        """A cuFile handle of each file by its path, and how bytes travel.

        KvikIO by itself falls back to ordinary reads and writes without saying so; it is asked not to, first.
        """
        defaults, mode = self._kvikio.defaults, self._kvikio.CompatMode
        # Without the nvidia-fs driver cuFile copies through the host as well, and slower than KvikIO does.
        if not defaults.is_compat_mode_preferred() and self._kvikio.cufile_driver.get("is_gds_available"):
            try:
                with defaults.set({"compat_mode": mode.OFF}), ExitStack() as undo:
                    handles = self._handles_of_files(undo)
                    self._open.push(undo.pop_all())
            except RuntimeError as error:
                _log.warning("cuFile cannot open the spill files, which KvikIO now reads and writes through the host: %s", error)
            else:
                return handles, "GPUDirect Storage"
        try:
            with defaults.set({"compat_mode": mode.ON}):
                return self._handles_of_files(self._open), "compatibility mode (POSIX + bounce buffer)"
        except RuntimeError as error:
            raise UnsupportedError(f"KvikIO cannot open the spill files: {error}; choose another storage_path") from error

    def _handles_of_files(self, undo: ExitStack) -> dict[Any, Any]:
        handles = {}
        for file in self._files:
            handles[file.path] = self._kvikio.CuFile(file.path, "r+")
            undo.callback(handles[file.path].close)
        return handles


def load_kvikio() -> Any:
    """KvikIO's module, with what is needed of its submodules. Raises UnsupportedError if it or the driver is missing."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnsupportedError(
            f"GPUDirect Storage needs NVIDIA's driver ({error}); install it, or choose another storage_path"
        ) from error
    try:
        import kvikio
        import kvikio.cufile_driver
        import kvikio.defaults
    except ImportError as error:
        raise UnsupportedError(
            f"GPUDirect Storage needs KvikIO ({error}); install teraio[cuda12] or teraio[cuda13], or choose another storage_path"
        ) from error
    return kvikio


def _failed(slot: Slot, piece: Chunk, action: str, code: int | None) -> StorageIOError:
    return StorageIOError(path=str(piece.extent.path), block=slot.name, errno=code or errno.EIO, action=action)
