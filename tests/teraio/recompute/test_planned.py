"""A plan of the planner that recomputes, where the drive is slow: training stays the same."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from torch import Tensor

import planner
from runtime.transfer import Engine, LinkRates

from ...training import Training
from .test_reruns import ROWS, Model, batch, loss_of
from .training import check, lower, program, train

SLOW = 1e7
"""Bytes per second: an activation takes half a second, and a stage takes milliseconds."""
RATES = LinkRates(
    write_bytes_per_second=SLOW,
    read_bytes_per_second=SLOW,
    write_latency_seconds=0.0,
    read_latency_seconds=0.0,
    duplex_write_bytes_per_second=SLOW,
    duplex_read_bytes_per_second=SLOW,
)


def large_batches(training: Training, number: int, values: list[Tensor]) -> None:
    loss = loss_of(training, batch(number, 3 * ROWS))
    loss.backward()
    values.append(loss.detach().clone())


LARGE = program(Model, large_batches, {"solver_time_limit": 3})


@pytest.mark.parametrize("recompute", ["auto", "off"])
def test_a_slow_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, recompute: str) -> None:
    reference = train(LARGE, {})
    monkeypatch.setattr(Engine, "measure", lambda *_, **__: RATES)
    # The policy that recomputes wherever it can: what "ilp" finds depends on how long the machine takes.
    monkeypatch.setattr(planner, "plan", functools.partial(planner.plan, policy="checkpoint"))
    budget = int(0.8 * reference.progress[-1].device_peak_bytes)
    options = {"memory_budget": budget, "recompute": recompute, **lower("storage", tmp_path)}
    with caplog.at_level("INFO", logger="teraio"):
        result = train(LARGE, options)
    check(result, reference, budget)
    last = result.progress[-1]
    assert last.phase == "planned"
    assert (last.recomputed_stages > 0) == (recompute == "auto")
    assert (last.recompute_seconds > 0) == (recompute == "auto")
    assert ("stages that run again an iteration" in caplog.text) == (recompute == "auto")
