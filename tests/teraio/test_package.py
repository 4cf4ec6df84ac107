"""What the package exports, how it is found by name, and what it says when its parts are hidden by others."""

import ast
import os
import re
import subprocess
import sys
import time
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo

import planner
import teraio
import teraio.backend
from teraio.registry import REGISTRY

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


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
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)


NAMES = """
    IterationStats Parked Status __version__ capture compile manage_optimizer on_device on_iteration
    park reset status step_done under_budget wait_for_plan
"""
ERRORS = """
    BudgetError CheckpointError ChecksumError OptionsError PlanError RankError StorageError StorageFullError StorageIOError
    TeraioError TraceError UnsupportedError
"""


def test_exported_names() -> None:
    """Errors are the planner's own, and one tree."""
    assert sorted(teraio.__all__) == sorted(f"{NAMES} {ERRORS}".split())
    assert all(hasattr(teraio, name) for name in teraio.__all__)
    assert all(getattr(teraio, name) is getattr(planner, name) for name in ERRORS.split())
    assert all(issubclass(getattr(teraio, name), teraio.TeraioError) for name in ERRORS.split())


def test_torch_is_imported_only_when_needed(tmp_path: Path) -> None:
    done = script(
        tmp_path,
        "import sys\n"
        "import teraio\n"
        "from teraio import Status, reset, status, wait_for_plan\n"
        "print('torch' in sys.modules, status(), 'torch' in sys.modules)\n",
    )
    assert (done.returncode, done.stdout) == (0, "False () True\n"), done.stderr


GONE = """
import torch._dynamo, torch._guards, torch.utils._python_dispatch
import teraio

del torch._guards.detect_fake_mode, torch.utils._python_dispatch.TorchDispatchMode
del torch.utils._python_dispatch.is_traceable_wrapper_subclass
model = torch.nn.Linear(2, 2)
for door in (
    lambda: teraio.capture(model, (torch.ones(1, 2),)),
    lambda: teraio.under_budget(storage="."),
    lambda: teraio.compile(model),
    lambda: __import__("teraio.backend"),
    teraio.status,
):
    try:
        door()
    except teraio.UnsupportedError as error:
        print(error)
"""


def test_whatever_is_called_first_says_which_name_of_torch_is_gone(tmp_path: Path) -> None:
    done = script(tmp_path, GONE)
    told = f"teraio uses torch._guards.detect_fake_mode, and torch {torch.__version__} has no such name"
    assert done.returncode == 0, done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [told] * 5


NETWORK = ("ftplib", "http", "httpx", "imaplib", "poplib", "requests", "smtplib", "socket", "ssl", "urllib")


def test_nothing_of_it_can_talk_to_a_network() -> None:
    """Ranks talk by PyTorch's own store."""
    for file in (file for package in ("planner", "runtime", "teraio") for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {*NETWORK}, f"{file} imports {names}"


def test_an_old_python_is_refused_by_a_line(tmp_path: Path) -> None:
    done = script(tmp_path, "import sys\nsys.version_info = (3, 10, 13)\nimport teraio\n")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ImportError: teraio works with Python 3.11 and later, and this is Python 3.")


@pytest.mark.parametrize(("part", "shape"), [("planner", "{}/__init__.py"), ("runtime", "{}.py")])
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


@needs_metadata
def test_what_is_installed() -> None:
    """The backend is found by its name, the command line is there, and versions agree."""
    assert "teraio" in torch._dynamo.list_backends(exclude_tags=())
    (entry,) = entry_points(group="torch_dynamo_backends", name="teraio")
    assert entry.load() is torch._dynamo.lookup_backend("teraio") is teraio.backend.teraio
    (entry,) = entry_points(group="console_scripts", name="teraio")
    assert entry.value == "teraio.cli:main"
    assert teraio.__version__ == PROJECT["version"] == distribution("teraio").version


def test_what_tells_the_version_tells_the_same() -> None:
    told = [(ROOT / "CITATION.cff", "version: "), (ROOT / "mkdocs.yml", "copyright: teraio ")]
    assert all(f"\n{before}{PROJECT['version']}" in file.read_text() for file, before in told)


def test_every_package_that_is_installed_for_tests_has_one_version() -> None:
    """Otherwise `make test-models` runs with others next month. Not KvikIO, for GPUs. timm is in no extra, see the Makefile."""
    extras = [needed for name, extra in PROJECT["optional-dependencies"].items() if "cuda" not in name for needed in extra]
    names = {re.split(r"[<>=\[]", needed)[0].lower() for needed in (*PROJECT["dependencies"], *extras, "timm", "torchvision")}
    pinned = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert names <= pinned


def test_all_runs_together_wait_for_their_plans_no_longer_than_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def wait(seconds: float) -> bool:
        given.append(seconds)
        time.sleep(0.05)
        return True

    monkeypatch.setattr(REGISTRY, "runs", lambda: [SimpleNamespace(background=SimpleNamespace(wait=wait))] * 2)
    assert teraio.wait_for_plan(10.0) and given[1] <= given[0] - 0.05
