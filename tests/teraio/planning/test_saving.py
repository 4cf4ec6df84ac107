"""Files that cannot be written do not end training."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import planner
import teraio
from teraio.planning.saving import save


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
    teraio.reset()
    torch._dynamo.reset()
    folder = tmp_path / "traces"
    folder.mkdir()
    module = nn.Linear(64, 64)
    options = {"codegen": "eager", "trace_out": folder / "trace.json", "profile_iterations": 1}
    model = torch.compile(module, backend="teraio", options=options)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, logger="teraio"):
        for step in range(5):
            model(torch.randn(4, 64)).square().mean().backward()
            sgd.step()
            sgd.zero_grad()
            if step == 0:
                shutil.rmtree(folder)
    assert [record.message for record in caplog.records if "could not be written" in record.message]
    status = teraio.status()[0]
    teraio.reset()
    assert status.phase == "fits" and status.iterations == 5 and status.trace_path is None
