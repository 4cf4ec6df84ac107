"""What the package exports, how it is found by name, and what it says when its parts are hidden by others."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from pathlib import Path

import pytest
import torch
import torch._dynamo

import planner
import teraio
import teraio.backend

ROOT = Path(__file__).parents[2]


def installed() -> bool:
    try:
        distribution("teraio")
    except PackageNotFoundError:
        return False
    return True


needs_metadata = pytest.mark.skipif(not installed(), reason="teraio is not installed, so it has no entry points")


def script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Runs a script that lies in `folder`, with this teraio to be had."""
    (folder / "train.py").write_text(text)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(folder / "train.py")]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


def test_exported_names() -> None:
    assert sorted(teraio.__all__) == [
        "BudgetError",
        "CheckpointError",
        "ChecksumError",
        "CsvWriter",
        "IterationStats",
        "OptionsError",
        "Parked",
        "PlanError",
        "RankError",
        "Stats",
        "Status",
        "StorageError",
        "StorageFullError",
        "StorageIOError",
        "TeraioError",
        "TraceError",
        "UnsupportedError",
        "__version__",
        "capture",
        "compile",
        "manage_optimizer",
        "node_status",
        "on_device",
        "on_iteration",
        "park",
        "reset",
        "stats",
        "status",
        "step_done",
        "under_budget",
        "wait_for_plan",
    ]
    assert all(hasattr(teraio, name) for name in teraio.__all__)


def test_errors_are_the_planners_own_and_one_tree() -> None:
    errors = [name for name in teraio.__all__ if name.endswith("Error")]
    assert all(getattr(teraio, name) is getattr(planner, name) for name in errors)
    assert all(issubclass(getattr(teraio, name), teraio.TeraioError) for name in errors)


def test_the_functions_before_any_model_is_compiled() -> None:
    assert teraio.status() == ()
    assert teraio.wait_for_plan(timeout_seconds=0.0) is True
    teraio.reset()
    assert teraio.status() == ()


def test_torch_is_imported_only_when_needed(tmp_path: Path) -> None:
    done = script(
        tmp_path,
        "import sys\n"
        "import teraio\n"
        "from teraio import Status, reset, status, wait_for_plan\n"
        "print('torch' in sys.modules, status(), 'torch' in sys.modules)\n",
    )
    assert (done.returncode, done.stdout) == (0, "False () True\n"), done.stderr


@pytest.mark.parametrize("part", ["planner", "runtime"])
@pytest.mark.parametrize("shape", ["{}/__init__.py", "{}.py"])
def test_a_package_of_the_users_that_hides_ours_is_named(tmp_path: Path, part: str, shape: str) -> None:
    hiding = tmp_path / shape.format(part)
    hiding.parent.mkdir(exist_ok=True)
    hiding.write_text("raise RuntimeError('this is not teraio to run')\n")
    done = script(tmp_path, "import teraio\n")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: teraio needs its own package {part!r}, but found {hiding}; "
        "rename that file or folder, or start your script from another directory"
    )


def test_it_is_named_also_if_the_script_has_imported_it_before(tmp_path: Path) -> None:
    (tmp_path / "planner").mkdir()
    (tmp_path / "planner" / "__init__.py").touch()
    done = script(tmp_path, "import planner\nimport teraio\n")
    assert done.returncode == 1 and "ImportError: teraio needs its own package 'planner'" in done.stderr


def test_a_folder_that_is_no_package_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "planner").mkdir()
    (tmp_path / "planner" / "notes.txt").touch()
    assert script(tmp_path, "import teraio\n").returncode == 0


@needs_metadata
def test_the_backend_is_found_by_name() -> None:
    assert "teraio" in torch._dynamo.list_backends(exclude_tags=())
    (entry,) = entry_points(group="torch_dynamo_backends", name="teraio")
    assert entry.load() is teraio.backend.teraio
    assert torch._dynamo.lookup_backend("teraio") is teraio.backend.teraio


@needs_metadata
def test_the_command_line_is_installed() -> None:
    (entry,) = entry_points(group="console_scripts", name="teraio")
    assert entry.value == "teraio.cli:main"


@needs_metadata
def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert teraio.__version__ == project["version"] == distribution("teraio").version


def test_every_package_that_is_installed_for_tests_has_one_version() -> None:
    """Otherwise `make test-models` runs with others next month. Not KvikIO, for GPUs. timm is in no extra, see the Makefile."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [needed for name, extra in project["optional-dependencies"].items() if "cuda" not in name for needed in extra]
    names = {re.split(r"[<>=\[]", needed)[0].lower() for needed in (*project["dependencies"], *extras, "timm", "torchvision")}
    pinned = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert names <= pinned
