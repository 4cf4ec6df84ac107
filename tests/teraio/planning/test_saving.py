"""Files that cannot be written do not end training."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

import planner
from teraio.planning import save

from ...training import mean_square_step, random_rows, weights_of_1_mib


def trace() -> planner.Trace:
    return planner.Trace.load(next((Path(__file__).parents[3] / "traces" / "hand").glob("chain*.json")))


def test_the_path_is_given_only_if_the_file_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    assert save(trace(), path) == path and planner.Trace.load(path).stages == trace().stages
    assert save(trace(), None) is None
    with caplog.at_level(logging.WARNING, logger="teraio"):
        assert save(trace(), tmp_path / "gone" / "trace.json") is None
    (record,) = caplog.records
    assert "the trace could not be written to" in record.message and "training goes on without" in record.message


def test_training_goes_on_where_the_trace_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    training = weights_of_1_mib({"trace_out": folder / "trace.json", "profile_iterations": 1}, count=1)

    def step(batch: torch.Tensor, index: int) -> None:
        mean_square_step(training, batch)
        if index == 0:
            shutil.rmtree(folder)

    with caplog.at_level(logging.WARNING, logger="teraio"):
        training.run(random_rows(5), step)
    assert [record.message for record in caplog.records if "could not be written" in record.message]
    training.finish()
    (status,) = training.progress[-1]
    assert status.phase == "fits" and status.iterations == 5 and status.trace_path is None
