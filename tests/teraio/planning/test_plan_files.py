"""What is written of a trace and a plan: files, which cannot end a training."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from torch import Tensor

import planner
import teraio
from planner import Budgets, Trace
from runtime.system import frozen
from teraio.planning import save

from ...training import MIB, mean_square_step, random_rows, weights_of_1_mib
from ..traces import CHAIN

PLAN = planner.plan(CHAIN, Budgets(device_bytes=planner.floor(CHAIN)[0]), policy="zero-infinity")


def test_the_path_is_given_only_if_the_file_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    assert save(CHAIN, path) == path and Trace.load(path).stages == CHAIN.stages
    assert save(CHAIN, None) is None
    with caplog.at_level(logging.WARNING, logger="teraio"):
        assert save(CHAIN, tmp_path / "gone" / "trace.json") is None
    (record,) = caplog.records
    assert "the trace could not be written to" in record.message and "training goes on without" in record.message


def test_as_long_as_a_plan_is_followed_the_collector_passes_over_what_training_holds(tmp_path: Path) -> None:
    options = {"memory_budget": 10 * MIB, "storage": tmp_path, "profile_iterations": 1}
    training = weights_of_1_mib(options, count=12)
    held: dict[str, list[bool]] = {}

    def step(batch: Tensor, index: int) -> None:
        mean_square_step(training, batch)
        held.setdefault(teraio.status()[-1].phase, []).append(frozen())

    training.run(random_rows(8), step, planned=True)
    assert not any(held["profile"]) and held["planned"] and all(held["planned"])
    training.finish()
    assert not frozen()
