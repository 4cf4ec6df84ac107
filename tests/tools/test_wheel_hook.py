"""A wheel gets its C++ functions compiled: each for every PyTorch, or for each minor version that the build is shown."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from hatchling.bridge.app import Application

from tools import wheel_hook
from tools.wheel_hook import WheelHook, libraries

ROOT = Path(__file__).parents[2]
COMPILER = "import sys; open(sys.argv[sys.argv.index('-o') + 1], 'w').write(' '.join(sys.argv))"


def torch_folder(path: Path, version: str) -> Path:
    path.mkdir()
    (path / "version.py").write_text(f"__version__ = '{version}'\ndebug = False\n")
    return path


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one file of each kind, and a compiler that writes down how it was called."""
    system = tmp_path / "runtime" / "system"
    system.mkdir(parents=True)
    shutil.copy(ROOT / "runtime" / "system" / "compilation.py", system)
    (system / "sums.cpp").write_text("#include <cstddef>\n")
    (system / "swap.cpp").write_text("#include <c10/core/StorageImpl.h>\n")
    (tmp_path / "compiler.py").write_text(COMPILER)
    monkeypatch.setenv("CXX", f"{sys.executable} {tmp_path / 'compiler.py'}")
    monkeypatch.setattr(wheel_hook, "torch_folders", lambda: [torch_folder(tmp_path / "torch", "2.13.0+cpu")])
    return tmp_path


def built(project: Path, version: str = "standard") -> dict[str, Any]:
    """What the hook tells hatchling."""
    build_data: dict[str, Any] = {"force_include": {}, "pure_python": True}
    hook = WheelHook(str(project), {}, None, None, str(project), "wheel", Application())  # type: ignore[arg-type]
    hook.initialize(version, build_data)
    hook.finalize(version, build_data, "")
    assert not any(Path(library).exists() for library in build_data["force_include"]), "nothing is left behind"
    return build_data


def test_each_library_is_for_the_torchs_that_it_fits(project: Path) -> None:
    torches = [
        torch_folder(project / str(at), version) for at, version in enumerate(("2.13.0", "2.13.1", "2.14.1+cu130", "2.15.0a0"))
    ]
    made = libraries(project, torches, project)
    names = ["sums.so", "swap.torch-2.13.so", "swap.torch-2.14.so"]
    assert [Path(place).name for place in made.values()] == names
    first, second, third = ((project / name).read_text() for name in names)
    assert "torch" not in first.replace(str(project), "")
    assert f"-isystem{torches[0]}/include" in second and f"-L{torches[2]}/lib" in third
    (torches[0] / "version.py").unlink()
    with pytest.raises(ValueError, match="no version of PyTorch; let TORCHES list folders"):
        libraries(project, torches, project)


def test_the_wheel_is_for_this_system_and_every_python(project: Path) -> None:
    data = built(project)
    assert sorted(data["force_include"].values()) == ["runtime/system/sums.so", "runtime/system/swap.torch-2.13.so"]
    assert data["tag"].startswith("py3-none-linux_") and data["pure_python"] is False


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_a_wheel_without_libraries_is_for_every_system(
    compiler: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", compiler)
    assert built(project) == {"force_include": {}, "pure_python": True}
    told = capsys.readouterr()
    assert "compiled at the first use" in told.out + told.err


def test_an_editable_installation_compiles_nothing(project: Path) -> None:
    assert built(project, "editable") == {"force_include": {}, "pure_python": True}
