"""What stands for a GPU under its stores: KvikIO over ordinary memory and files, a pinner, a copier whose copies end late."""

from __future__ import annotations

import ctypes
import enum
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import torch

from runtime.system import CudaPinner
from runtime.transfer import aligned


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
        assert flags in ("r+", "r")
        module.opened.append((path, module.values["compat_mode"]))
        if module.values["compat_mode"] is not CompatMode.ON and module.refuses:
            raise RuntimeError("cuFile error: not supported by the file system")
        self._module = module
        self._descriptor = os.open(path, os.O_RDWR if flags == "r+" else os.O_RDONLY)
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
    """Stands for the module. It records all calls.

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


class RecordingPinner(CudaPinner):
    """Pins nothing, and records what it should pin and unpin. failure: raised when it should pin."""

    def __init__(self, failure: Exception | None = None) -> None:
        super().__init__(torch.device("cuda"))
        self.calls: list[tuple[str, int, int]] = []
        self.failure = failure

    def pin(self, address: int, size_bytes: int) -> None:
        self.calls.append(("pin", address, size_bytes))
        if self.failure is not None:
            raise self.failure

    def unpin(self, address: int, size_bytes: int) -> None:
        ctypes.string_at(address, size_bytes)  # the memory is still there
        self.calls.append(("unpin", address, size_bytes))


# -- a copier: code that does not wait for its copies finds wrong bytes

POISON = 0xA5


class SlowCopy(threading.Thread):
    """Fills the target with poison at once, and copies the source up to two milliseconds later."""

    def __init__(self, target_address: int, source_address: int, size_bytes: int, delay_seconds: float) -> None:
        super().__init__(daemon=True)
        self._copy = (target_address, source_address, size_bytes)
        self._delay_seconds = delay_seconds
        ctypes.memset(target_address, POISON, size_bytes)
        self.start()

    def run(self) -> None:
        time.sleep(self._delay_seconds)
        ctypes.memmove(*self._copy)


class SlowCopier:
    """A `Copier` between ordinary memory and ordinary memory. buffers: the bytes of each buffer that was asked for."""

    def __init__(self) -> None:
        self.buffers: list[int] = []
        self._ranges: list[range] = []
        self._random = random.Random(0)

    def buffer(self, size_bytes: int) -> torch.Tensor:
        made = aligned(lambda size: torch.zeros(size, dtype=torch.uint8), size_bytes)
        self.buffers.append(size_bytes)
        self._ranges.append(range(made.data_ptr(), made.data_ptr() + size_bytes))
        return made

    def copy(self, buffer: torch.Tensor, address: int, *, to_device: bool) -> Callable[[], None]:
        held = buffer.data_ptr()
        assert any(held in each and held + buffer.nbytes - 1 in each for each in self._ranges)
        if to_device:
            return self._begin("in", address, held, buffer.nbytes).join
        return self._begin("out", held, address, buffer.nbytes).join

    def _begin(self, direction: str, target_address: int, source_address: int, size_bytes: int) -> SlowCopy:
        return SlowCopy(target_address, source_address, size_bytes, self._random.choice((0.0, 0.0005, 0.002)))
