"""What the log tells of optimizers whose parameters are in no compiled graph."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from teraio.registry import REGISTRY, STEPS

from ...training import compiled
from ..parity.harness import compiled_input_needs_grad


class Recurrent(nn.Module):
    """Dynamo leaves all of it out."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(256, 512, batch_first=True), nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(x)[0])
        return y


@pytest.fixture(autouse=True)
def first_steps(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As in a process that has called torch.compile with teraio, and in which nothing has run."""
    caplog.set_level(logging.WARNING, logger="teraio")
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(STEPS, "_had_runs", False)
    monkeypatch.setattr(STEPS, "_wanted", lambda: True)


def train(model: Any, module: nn.Module, x: Tensor, steps: int = 4) -> Optimizer:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def test_nothing_was_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Said once, with the reason."""
    module = Recurrent()
    model = compiled(module, {"memory_budget": 64 << 20, "storage": str(tmp_path)})
    train(model, module, torch.ones(2, 3, 256))
    train(model, module, torch.ones(2, 3, 256))
    (said,) = caplog.messages
    assert said.startswith(
        "SGD steps, but torch.compile has not given teraio any graph: this training is not managed (graph breaks: "
    )
    assert "RNN, GRU, or LSTM" in said and "TORCH_LOGS=graph_breaks" in said


@compiled_input_needs_grad
def test_most_was_not_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Only the head was, by itself."""
    module = Recurrent()
    options = {"memory_budget": 64 << 20, "storage": str(tmp_path)}
    head = compiled(module.head.forward, options)
    train(lambda x: head(module.lstm(x)[0]), module, torch.ones(2, 3, 256))
    (said,) = caplog.messages
    outside = sum(parameter.nbytes for parameter in module.lstm.parameters())
    total = sum(parameter.nbytes for parameter in module.parameters())
    assert said.startswith(f"SGD updates {total:,} bytes of parameters, and {outside:,} of them are in no graph")


class Whole(nn.Module):
    """Is compiled as a whole. frozen: a part without gradients, which no optimizer changes."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.frozen = nn.Linear(512, 512), nn.Linear(1024, 1024)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x)
        return y


def test_nothing_is_said_where_all_is_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Compiled as a whole; then an eager model without a run, as after `teraio.reset()`; then a tiny optimizer."""
    module = Whole()
    train(compiled(module, {"memory_budget": 64 << 20, "storage": str(tmp_path)}), module, torch.ones(2, 512))
    REGISTRY.reset()
    train(module, module, torch.ones(2, 512))
    tiny = nn.Linear(4, 4)
    train(tiny, tiny, torch.ones(2, 4))
    assert not caplog.messages


def test_nothing_is_said_where_parameters_get_other_memory_before_the_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As by SAM, which steps with the parameters that it has put aside."""
    module = Whole()
    model = compiled(module, {"memory_budget": 64 << 20, "storage": str(tmp_path)})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(4):
        kept = {parameter: parameter.data.clone() for parameter in module.parameters()}
        for _ in range(2):
            model(torch.ones(2, 512)).square().mean().backward()
        for parameter, old in kept.items():
            parameter.data = old
        optimizer.step()
        optimizer.zero_grad()
    assert not caplog.messages
