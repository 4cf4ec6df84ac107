"""What the launcher of the made-up GPU says where something is missing. `make test-made-up-gpu` tests the driver."""

from __future__ import annotations

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
