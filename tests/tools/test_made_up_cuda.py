"""What the launcher of the made-up GPU says where something is missing. `make test-made-up-gpu` tests the driver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools.made_up_cuda import __main__ as launcher
from tools.made_up_cuda import build


def test_a_torch_without_cuda_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, as all that is missing."""
    (tmp_path / "version.py").write_text("__version__ = '2.99.0'\ncuda = None\n")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: spec)
    assert launcher.main(["--", "script.py"]) == 2
    error = capsys.readouterr().err
    assert "is built without CUDA: python -m pip install torch" in error and error.count("\n") == 1


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
