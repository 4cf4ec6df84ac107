"""KvikIO without a GPU: the functions that the store uses, over ordinary memory and files. It records all calls."""

from __future__ import annotations

import ctypes
import enum
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any


class CompatMode(enum.Enum):
    OFF = 0
    ON = 1
    AUTO = 2


class _Settings:
    """The result of `defaults.set`. The settings hold at once; the end of a `with` block restores the old ones."""

    def __init__(self, values: dict[str, Any], new: dict[str, Any]) -> None:
        self._values = values
        self._before = {name: values[name] for name in new}
        values.update(new)

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._values.update(self._before)


class _Future:
    def __init__(self, work: Callable[[], int]) -> None:
        self._work = work

    def get(self) -> int:
        return self._work()


class _CuFile:
    def __init__(self, module: FakeKvikio, path: Path, flags: str) -> None:
        assert flags == "r+"
        module.opened.append((path, module.values["compat_mode"]))
        if module.values["compat_mode"] is not CompatMode.ON and module.refuses:
            raise RuntimeError("cuFile error: not supported by the file system")
        self._module = module
        self._descriptor = os.open(path, os.O_RDWR)
        module.live.append(self)

    def close(self) -> None:
        os.close(self._descriptor)
        self._module.live.remove(self)

    def pwrite(self, memory: Any, size: int, file_offset: int, task_size: int) -> _Future:
        view = self._view("write", memory, size, file_offset, task_size)
        return _Future(lambda: self._module.shorten(os.pwrite(self._descriptor, view, file_offset)))

    def pread(self, memory: Any, size: int, file_offset: int, task_size: int) -> _Future:
        view = self._view("read", memory, size, file_offset, task_size)
        return _Future(lambda: self._module.shorten(os.preadv(self._descriptor, [view], file_offset)))

    def _view(self, action: str, memory: Any, size: int, file_offset: int, task_size: int) -> memoryview:
        array = memory.__cuda_array_interface__
        address, read_only = array["data"]
        assert array["shape"] == (size,) and array["typestr"] == "|u1" and array["version"] == 3 and not read_only
        self._module.calls.append((action, address, size, file_offset, task_size))
        if self._module.error is not None:
            raise self._module.error
        return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


class FakeKvikio:
    """Stands for the module.

    refuses: cuFile cannot open these files. error: every transfer raises it.
    lost_bytes: every transfer moves so many bytes fewer than requested, and reports that.
    """

    __version__ = "26.99.00"
    CompatMode = CompatMode

    def __init__(self, *, compatible_only: bool = True, driver: bool = True, refuses: bool = False) -> None:
        self.values: dict[str, Any] = {
            "compat_mode": CompatMode.AUTO,
            "num_threads": 1,
            "task_size": 4 << 20,
            "bounce_buffer_size": 16 << 20,
            "gds_threshold": 16384,
            "auto_direct_io_read": False,
            "auto_direct_io_write": True,
        }
        self.defaults = SimpleNamespace(
            set=lambda new: _Settings(self.values, new), is_compat_mode_preferred=lambda: compatible_only
        )
        self.cufile_driver = SimpleNamespace(get=lambda name: {"is_gds_available": driver}[name])
        self.refuses = refuses
        self.error: Exception | None = None
        self.lost_bytes = 0
        self.opened: list[tuple[Path, CompatMode]] = []
        self.live: list[_CuFile] = []
        self.calls: list[tuple[str, int, int, int, int]] = []

    def CuFile(self, path: Path, flags: str) -> _CuFile:
        return _CuFile(self, path, flags)

    def shorten(self, moved: int) -> int:
        return moved - self.lost_bytes
