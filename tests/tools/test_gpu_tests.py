"""The tests for a GPU run file by file, and no further than the first error that spoils a process."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tools import gpu_tests

QUICK = ("-p", "no:cacheprovider", "-q", "-c", "/dev/null")


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer to load than these tests to run."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def test_every_file_has_its_place() -> None:
    folder = Path(__file__).parents[1] / "gpu"
    assert [path.name for path in gpu_tests.files(folder)] == list(gpu_tests.ORDER)


@pytest.mark.parametrize("name", gpu_tests.ORDER)
def test_every_file_can_be_imported_without_a_gpu(name: str) -> None:
    importlib.import_module(f"..gpu.{name.removesuffix('.py')}", __package__)


def test_a_failure_lets_the_others_run_and_an_interruption_does_not(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_made_up_driver.py").write_text("def test_fails(): assert False")
    (tmp_path / "test_stores.py").write_text(
        "def test_spoils(request): request.session.shouldstop = 'sticky CUDA error in test_spoils: illegal access'; assert False"
        "\ndef test_not_reached(): print('reached')"
    )
    (tmp_path / "test_parity.py").write_text("def test_not_reached(): print('reached')")
    assert gpu_tests.main(["-s", *QUICK], tmp_path) == 2
    said = capfd.readouterr().out
    assert "-- test_made_up_driver.py" in said and "-- test_stores.py" in said and "-- test_parity.py" not in said
    assert "sticky CUDA error in test_spoils: illegal access" in said and "reached" not in said.replace("test_not_reached", "")
    assert "test_stores.py was interrupted: no further file is run" in said


@pytest.mark.parametrize(("content", "status"), [("def test_passes(): pass", 0), ("def test_fails(): assert False", 1), ("", 1)])
def test_the_status_is_that_of_all_files(content: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "test_stores.py").write_text(content)
    assert gpu_tests.main(QUICK, tmp_path) == status
