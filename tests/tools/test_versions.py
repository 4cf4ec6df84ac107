"""Which interpreters are found, what a run's outcome is, and the table that is made of runs."""

from __future__ import annotations

from typing import Any

import pytest

from tools import versions


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


@pytest.mark.parametrize(
    ("step", "status", "said", "found"),
    [
        ("core", 0, "7 failed tests are named here\n=== 12 passed, 3 skipped, 1 warning in 3.00s ===", [12, 0]),
        ("core", 1, "FAILED a\n2 failed, 10 passed, 1 error in 3.00s", [10, 3]),
        ("models", 0, "2 skipped in 1.00s", [0, 0]),
        ("models", 4, "ERROR: not found", [0, 1]),
        ("demo", 0, "same losses", [1, 0]),
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


def test_steps_that_ran_on_one_day_are_one_run_and_what_did_not_run_is_told() -> None:
    core = {name: value for name, value in cell("3.11.7", "2.13.0").items() if name not in ("demo", "models")}
    text = versions.page([core])
    assert "| 10 tests; demo, models not run (3.11.7, 2026-01-02) |" in text
    (both,) = versions.merged([cell("3.11.7", "2.13.0", failed=3)], core)
    assert "| 10 tests, demo, 2 models (3.11.7, 2026-01-02) |" in versions.page([both])
    (later,) = versions.merged([both], {**core, "date": "2026-01-03"})
    assert "demo, models not run (3.11.7, 2026-01-03)" in versions.page([later])
