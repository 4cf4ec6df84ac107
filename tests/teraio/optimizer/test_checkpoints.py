"""Every optimizer, saved half-way and loaded by the other kind: managed by teraio, or plain."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import Tensor, nn
from torch.optim import Optimizer

from .managed_training import Start
from .plain_training import OPTIMIZERS, SIZE, everything, plain, same, set_gradients, square_parameters

STEPS, HALF = 50, 25
BUDGET_BYTES = 11 * SIZE
"""Less than six parameters and their gradients."""

Checkpoint = tuple[list[Tensor], dict[str, Any]]


def steps(optimizer: Optimizer, parameters: list[nn.Parameter], numbers: range) -> None:
    for number in numbers:
        set_gradients(parameters, number)
        optimizer.step()
        optimizer.zero_grad()


def saved(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Checkpoint:
    return [parameter.detach().clone() for parameter in parameters], copy.deepcopy(optimizer.state_dict())


def load(checkpoint: Checkpoint, optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    for parameter, value in zip(parameters, checkpoint[0], strict=True):
        parameter.data.copy_(value)
    optimizer.load_state_dict(checkpoint[1])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_managed_to_plain(name: str, started: Start) -> None:
    training = started(6, budget_bytes=BUDGET_BYTES)
    optimizer = OPTIMIZERS[name](training.parameters)
    steps(optimizer, training.parameters, range(HALF))
    checkpoint = saved(optimizer, training.parameters)
    training.steps.close()
    assert any(line.startswith("in ") for line in training.mover.log), "not all of it fits"
    parameters = square_parameters(6)
    resumed = OPTIMIZERS[name](parameters)
    load(checkpoint, resumed, parameters)
    steps(resumed, parameters, range(HALF, STEPS))
    assert same(everything(resumed), plain(STEPS, make=OPTIMIZERS[name]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_plain_to_managed(name: str, started: Start) -> None:
    parameters = square_parameters(6)
    first = OPTIMIZERS[name](parameters)
    steps(first, parameters, range(HALF))
    training = started(6, budget_bytes=BUDGET_BYTES)
    resumed = OPTIMIZERS[name](training.parameters)
    load(saved(first, parameters), resumed, training.parameters)
    steps(resumed, training.parameters, range(HALF, STEPS))
    found = everything(resumed)
    training.steps.close()
    assert any(line.startswith("in ") for line in training.mover.log)
    assert same(found, plain(STEPS, make=OPTIMIZERS[name]))
