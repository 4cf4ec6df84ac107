"""The store between device memory and files by GPUDirect Storage (cuFile), through KvikIO. No other file imports KvikIO.

[Note: KvikIO and streams]
KvikIO waits for the device's default stream before it begins a copy. If kernels are queued there, every copy waits for all
of them. So stages must run on another stream, as they do under `runtime.cuda.streams`. The number of threads, the task size
and the other settings hold for the whole process; `close` restores them.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from planner.errors import UnsupportedError
from runtime.device import DeviceBytes
from runtime.storage.file_copies import io_error
from runtime.storage.file_space import FileSpace
from runtime.storage.slots import Chunk, Slot, content_of

# Of KvikIO's thread pool, which serves all callers. If KvikIO makes the copies itself, it cuts a chunk into tasks of this size.
_THREADS, _TASK_BYTES = 16, 4 << 20

_log = logging.getLogger(__name__)


class KvikioStore(FileSpace):
    """A `Store` whose addresses are in device memory, over the files of a `FileSpace`.

    kvikio: the module, by default the one that is installed.
    `description` tells how bytes travel: by GPUDirect Storage (`bypasses_host`), or through host memory if the drive, the file
    system or the driver does not support it. See [Note: KvikIO and streams].
    Raises UnsupportedError if KvikIO or a driver is missing, StorageError as `FileSpace` does.
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        *,
        budget_bytes: int | None,
        kvikio: Any = None,
    ) -> None:
        self._kvikio = load_kvikio() if kvikio is None else kvikio
        self._settings = {
            "num_threads": _THREADS,
            "task_size": _TASK_BYTES,
            "bounce_buffer_size": _TASK_BYTES,
            "gds_threshold": 0,  # small chunks are copied in the same way as large ones
            "auto_direct_io_read": True,
            "auto_direct_io_write": True,
        }
        super().__init__(directories, budget_bytes=budget_bytes)
        how = "GPUDirect Storage" if self.bypasses_host else "compatibility mode (POSIX + bounce buffer)"
        self.description = f"kvikio {self._kvikio.__version__}, {how}"

    def _open_again(self) -> None:
        self._open.enter_context(self._kvikio.defaults.set(self._settings))
        self._handles: dict[int, Any] = {}
        # Without the nvidia-fs driver cuFile copies through host memory too, and is slower than KvikIO.
        direct = not self._kvikio.defaults.is_compat_mode_preferred() and self._kvikio.cufile_driver.get("is_gds_available")
        self.bypasses_host = self._open_handles(list(self._files), "r+", self._open, "the spill files", direct=direct)

    def slot_in_file(self, name: str, path: Path, offset_bytes: int, size_bytes: int) -> Slot:
        slot = super().slot_in_file(name, path, offset_bytes, size_bytes)
        file = slot.file
        try:
            if file is not None and file.descriptor not in self._handles:  # by the host where cuFile cannot
                self._open_handles([file.descriptor], "r", file.closing, str(file.path), direct=self.bypasses_host)
        except BaseException:
            self.release(slot)
            raise
        return slot

    def _open_handles(self, descriptors: Sequence[int], flags: str, until: ExitStack, what: str, *, direct: bool) -> bool:
        """Open cuFile handles of files until `until` is closed: those of the user as long as their descriptors live. Return
        whether bytes travel without host memory, if `direct`.

        Raises UnsupportedError.
        """
        # By default KvikIO falls back to ordinary reads and writes without a message. So try without the fallback first.
        mode = self._kvikio.CompatMode
        for bypasses in (True, False) if direct else (False,):
            try:
                with self._kvikio.defaults.set({"compat_mode": mode.OFF if bypasses else mode.ON}), ExitStack() as undo:
                    for descriptor in descriptors:
                        # Not by its name: somebody may have removed or replaced it since it was opened.
                        self._handles[descriptor] = handle = self._kvikio.CuFile(f"/proc/self/fd/{descriptor}", flags)
                        undo.callback(self._handles.pop, descriptor)
                        undo.callback(handle.close)
                    until.push(undo.pop_all())
                return bypasses
            except RuntimeError as error:
                if not bypasses:
                    raise UnsupportedError(f"KvikIO cannot open {what}: {error}; choose another storage_path") from error
                _log.warning("cuFile cannot open %s, which KvikIO now reads and writes through the host: %s", what, str(error))
        return False

    def write_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        self._check_open()
        self._copy("write", self._handles[chunk.extent.file_descriptor].pwrite, slot, chunk, address)

    def read_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        self._check_readable(slot)
        try:
            self._copy("read", self._handles[chunk.extent.file_descriptor].pread, slot, chunk, address)
        finally:
            if slot.file is not None:  # where it has changed, this is what went wrong
                slot.file.check(slot.name)

    def _copy(self, action: str, call: Any, slot: Slot, chunk: Chunk, address: int) -> None:
        begin, size = content_of(slot, chunk)
        offset = chunk.file_offset_bytes + begin
        where = f"at offset {offset:,}"
        memory = DeviceBytes(address + chunk.slot_offset_bytes + begin, size)
        try:
            moved = call(memory, size, offset, _TASK_BYTES).get()
        except (RuntimeError, OSError) as error:
            raise io_error(f"{action} {where} ({error})", slot, chunk, getattr(error, "errno", None)) from error
        if moved != size:
            raise io_error(f"{action} more than {moved:,} of {size:,} bytes {where}", slot, chunk, None)


def load_kvikio() -> Any:
    """Import KvikIO with the submodules that the store needs. Raises UnsupportedError if it or the driver is missing."""
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
    except Exception as error:  # it loads libraries while it is imported, each of which can fail in its own way
        lacking = [wheel for part, wheel in _WHEELS.items() if part in str(error)] or ["kvikio-cu13 (or -cu12)"]
        raise UnsupportedError(
            f"GPUDirect Storage needs KvikIO, which cannot be imported ({type(error).__name__}: {error}); install {lacking[0]}, "
            "or choose another storage_path"
        ) from error
    return kvikio


# What KvikIO's import asks for, in the words of its errors, and the package that has it; without such words, all of KvikIO.
_WHEELS = {
    "rapids_logger": "rapids-logger",
    "libkvikio": "libkvikio-cu13 (or -cu12)",
    "cupy": "cupy-cuda13x (or -cuda12x)",
    "cufile": "nvidia-cufile",
    "cuda.pathfinder": "cuda-pathfinder",
}
