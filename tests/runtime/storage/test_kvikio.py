"""The calls that the store makes to KvikIO, and its answers. The contract suite tests the bytes themselves."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.errors import StorageIOError, UnsupportedError
from runtime.storage import KvikioStore, load_kvikio

from ..memory import COPIES, Memory
from .fakes import CompatMode, FakeKvikio

MIB = 1 << 20


@pytest.mark.parametrize(
    ("kvikio", "description", "modes"),
    [
        (FakeKvikio(), "compatibility mode (POSIX + bounce buffer)", [CompatMode.ON]),
        (FakeKvikio(compatible_only=False), "GPUDirect Storage", [CompatMode.OFF]),
        (FakeKvikio(compatible_only=False, driver=False), "compatibility mode (POSIX + bounce buffer)", [CompatMode.ON]),
        (
            FakeKvikio(compatible_only=False, refuses=True),
            "compatibility mode (POSIX + bounce buffer)",
            [CompatMode.OFF, CompatMode.ON],
        ),
    ],
)
def test_how_bytes_travel_is_found_out_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kvikio: FakeKvikio, description: str, modes: list[CompatMode]
) -> None:
    store = KvikioStore([tmp_path], budget_bytes=None, kvikio=kvikio)
    assert store.description == f"kvikio 26.99.00, {description}"
    assert [mode for _, mode in kvikio.opened] == modes
    assert kvikio.values["compat_mode"] is CompatMode.AUTO
    assert ("not supported by the file system" in caplog.text) == kvikio.refuses
    store.close()
    assert kvikio.live == []


@pytest.mark.parametrize("call", ["write", "read"])
@pytest.mark.parametrize(
    ("error", "code", "what"),
    [
        (None, errno.EIO, "more than 1,044,480 of 1,048,576 bytes "),  # it moves less than it was asked to
        (RuntimeError("cuFile error: driver"), errno.EIO, ""),
        (OSError(errno.ENOSPC, "full"), errno.ENOSPC, ""),
    ],
)
def test_an_error_of_kvikio_names_file_block_and_offset(
    tmp_path: Path, call: str, error: Exception | None, code: int, what: str
) -> None:
    kvikio = FakeKvikio()
    store = KvikioStore([tmp_path], budget_bytes=None, kvikio=kvikio)
    store.allocate(MIB, "before")
    slot, memory = store.allocate(MIB, "layers.3.weight"), Memory(MIB)
    kvikio.error, kvikio.lost_bytes = error, 4096
    with pytest.raises(StorageIOError, match=re.escape(str(error or what))) as raised:
        COPIES[call](store, slot, memory.address)
    assert (raised.value.block, raised.value.path) == ("layers.3.weight", str(slot.extents[0].path))
    assert raised.value.errno == code and raised.value.__cause__ is error
    assert f"cannot {call} {what}at offset {slot.extents[0].offset_bytes:,} " in str(raised.value)
    store.close()


def test_files_that_nothing_can_open_leave_nothing_behind(folders: list[Path]) -> None:
    class Broken(FakeKvikio):
        def CuFile(self, path: Path, flags: str) -> Any:
            if len(self.live) == 1:
                raise RuntimeError("no more files")
            return super().CuFile(path, flags)

    for compatible_only in (True, False):
        kvikio = Broken(compatible_only=compatible_only)
        before = dict(kvikio.values)
        with pytest.raises(UnsupportedError, match="cannot open the spill files: no more files; choose another"):
            KvikioStore(folders, budget_bytes=None, kvikio=kvikio)
        assert kvikio.live == [] and kvikio.values == before
        assert not any(list(folder.iterdir()) for folder in folders)


@pytest.mark.skipif(importlib.util.find_spec("kvikio") is not None, reason="says what happens without KvikIO")
def test_what_is_missing_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"GPUDirect Storage needs (NVIDIA's driver \(|KvikIO, ).*install"):
        load_kvikio()


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (ModuleNotFoundError("No module named 'kvikio'"), r"install kvikio-cu13 \(or -cu12\)"),
        (ModuleNotFoundError("No module named 'rapids_logger'"), "install rapids-logger"),
        (RuntimeError("libcufile.so.0 not found"), "install nvidia-cufile"),
    ],
)
def test_an_import_that_fails_in_any_way_names_the_package(
    error: Exception, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            if name == "kvikio":
                raise error

    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    monkeypatch.delitem(sys.modules, "kvikio", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Failing, *sys.meta_path])
    with pytest.raises(
        UnsupportedError, match=rf"cannot be imported \({type(error).__name__}: .*\); {remedy}, or choose"
    ) as raised:
        load_kvikio()
    assert raised.value.__cause__ is error
