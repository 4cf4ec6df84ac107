"""What the launcher of the made-up GPU says where something is missing. `make test-made-up-gpu` tests the driver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.made_up_cuda import __main__ as launcher
from tools.made_up_cuda import build


@pytest.fixture
def torch_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a folder look like an installed torch that is built for a version of CUDA."""

    def make(cuda: str | None) -> Path:
        folder = tmp_path / "torch"
        folder.mkdir()
        (folder / "version.py").write_text(f"__version__ = '2.99.0'\ncuda = {cuda!r}\n")
        spec = SimpleNamespace(origin=str(folder / "__init__.py"))
        monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: spec)
        monkeypatch.setattr(build, "FOLDER", tmp_path / "made")
        monkeypatch.setattr(build, "_nvidia", lambda pattern: [])
        return folder

    return make


@pytest.mark.parametrize(
    ("cuda", "compiler", "told"),
    [
        (None, True, "is built without CUDA: python -m pip install torch"),
        ("13.0", True, "no CUDA headers (cuda.h, cuda_runtime_api.h) beside torch 2.99.0: python -m pip install"),
        ("13.0", False, "no C++ compiler: install g++"),
    ],
)
def test_what_is_missing_is_told(
    cuda: str | None,
    compiler: bool,
    told: str,
    torch_of: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch_of(cuda)
    if not compiler:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert launcher.main(["--", "script.py"]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_emulated_drives_take_their_time_and_write_nothing(tmp_path: Path) -> None:
    """In a process of its own, which it changes for good."""
    program = f"""
import ctypes, mmap, os, time
from planner.schema import Link
from runtime.storage import PosixStore
from runtime.transfer import Engine
from tools.made_up_cuda.emulated.device import Drive, keep_no_bytes

link = Link.model_validate({{"from": "device", "to": "storage", "bytes_per_second": 4 << 20, "latency_seconds": 0.01}})
keep_no_bytes(Drive(link), Drive(link), 1 << 40)
store = PosixStore([{str(tmp_path)!r}], budget_bytes=None)
engine = Engine(store)
memory = mmap.mmap(-1, 1 << 20)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
slot = store.allocate(1 << 20, "a block")
for move in (engine.write, engine.read):
    begun = time.monotonic()
    move(slot, address, lambda transfer: None).wait()
    assert time.monotonic() - begun >= 0.26
assert all(os.fstat(each.file_descriptor).st_blocks == 0 for each in slot.extents)
engine.close()
store.close()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
