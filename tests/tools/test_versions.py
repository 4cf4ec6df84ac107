"""Which interpreters are found, what a run's outcome is, and the table that is made of runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tools import versions

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def cell(python: str, torch: str, cuda: str | None = None, failed: int = 0, models: int = 2) -> dict[str, Any]:
    return {
        "python": python,
        "torch": torch,
        "cuda": cuda,
        "date": "2026-01-02",
        "core": [10 - failed, failed],
        "demo": [1, 0],
        "models": [models, 0],
    }


def test_what_stands_for_an_interpreter_and_does_not_run_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub, real = tmp_path / f"python{VERSION}", tmp_path / "pyenv" / "versions" / f"{VERSION}.9" / "bin" / "python"
    stub.write_text("#!/bin/sh\nexit 127\n")
    stub.chmod(0o755)
    real.parent.mkdir(parents=True)
    real.symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setattr(versions, "PYTHONS", (VERSION, "3.99"))
    assert versions.interpreters() == [str(real)]


@pytest.mark.parametrize(
    ("step", "status", "said", "found"),
    [
        ("core", 0, "7 failed tests are named here\n=== 12 passed, 3 skipped, 1 warning in 3.00s ===", [12, 0]),
        ("core", 1, "FAILED a\n2 failed, 10 passed, 1 error in 3.00s", [10, 3]),
        ("models", 0, "2 skipped in 1.00s", [0, 0]),
        ("demo", 1, "failed: other losses; 3 passed", [0, 1]),
    ],
)
def test_the_outcome_of_a_step(step: str, status: int, said: str, found: list[int]) -> None:
    assert versions.outcome(step, status, said) == found


def test_the_last_run_on_a_version_counts_and_what_failed_is_shown() -> None:
    cells: list[Any] = []
    for each in (
        cell("3.12.1", "2.13.0+cpu", failed=2),
        cell("3.12.4", "2.13.0+cpu", failed=1),
        cell("3.11.7", "2.13.0+cpu"),
        cell("3.13.0", "2.9.0", cuda="13.0", models=0),
    ):
        cells = versions.merged(cells, each)
    assert versions.page(cells).splitlines()[-4:] == [
        "| PyTorch | Python 3.11 | Python 3.12 | Python 3.13 |",
        "|---|---|---|---|",
        "| 2.9.0, built for CUDA 13.0 | not run | not run | **failed:** models 0 of 0 (3.13.0, 2026-01-02) |",
        "| 2.13.0, built for CPUs | 10 tests, demo, 2 models (3.11.7, 2026-01-02) "
        "| **failed:** core 1 of 10 (3.12.4, 2026-01-02) | not run |",
    ]
