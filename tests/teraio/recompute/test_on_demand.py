"""Blocks that are dropped without a plan, where the drive is slow: training stays the same, from the first iteration on."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import BudgetError
from runtime.paging import CopyRates
from teraio.machine import Machine

from ...thoroughness import every_other
from .test_reruns import PLAIN, PROGRAMS
from .training import Program, check, lower, train

SLOW = CopyRates(out_bytes_per_second=1e6, in_bytes_per_second=1e6)
"""An activation takes two seconds each way, and a stage takes milliseconds."""


def on_demand(trained: Program, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> list[int]:
    """Train without a plan and check that all is the same. Return how many stages ran again in each iteration."""
    reference = train(trained, {})
    monkeypatch.setattr(Machine, "copy_rates", SLOW)
    budget = reference.progress[-1].device_peak_bytes // 2
    limited = {**lower("storage", folder), "profile_iterations": 9, **options}
    try:
        result = train(trained, {"memory_budget": budget, **limited})
    except BudgetError as error:
        budget = error.smallest_bytes
        result = train(trained, {"memory_budget": budget, **limited})
    check(result, reference, budget)
    assert {status.phase for status in result.progress} == {"profile"}
    return [status.recomputed_stages for status in result.progress]


@pytest.mark.parametrize("name", every_other("plain", *PROGRAMS))
def test_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    again = on_demand({"plain": PLAIN, **PROGRAMS}[name], tmp_path, monkeypatch, debug=True)
    # There, the peak comes after the first backward pass; and the smallest budget, of the longest rows, holds the others whole.
    assert min(again[1:]) > 0 or name in ("retain_graph", "changing lengths")


def test_not_if_the_option_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(on_demand(PLAIN, tmp_path, monkeypatch, recompute="off"))
