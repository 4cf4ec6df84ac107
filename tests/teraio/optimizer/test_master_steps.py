"""Masters and what users put around a step: gradient scalers, which work, and what is refused."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import teraio
from planner.errors import UnsupportedError
from runtime.paging import State

from .managed_training import Start
from .plain_training import (
    HALF,
    MASTER_OPTIMIZERS,
    WIDE,
    Textbook,
    differences,
    half_parameters,
    keeping,
    set_most_gradients,
)

BUDGET = 14 * WIDE


OVERFLOWS = (0, 5)


class Scaler(torch.amp.GradScaler):
    """As a loop has it after `scale(loss).backward()`."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=8.0, growth_interval=3)
        self.scale(torch.zeros(()))

    def set_gradients(self, parameters: list[nn.Parameter], step: int) -> None:
        set_most_gradients(parameters, step, self.get_scale())
        if step in OVERFLOWS and parameters[1].grad is not None:
            parameters[1].grad[3, 3] = torch.inf


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["AdamW", "AdamW fused amsgrad", "AdamW foreach", "SGD momentum", "SGD fused", "Adafactor"])
@pytest.mark.parametrize("managed", [True, False])
def test_a_gradient_scaler(started: Start, name: str, dtype: torch.dtype, managed: bool) -> None:
    """Gradients are unscaled in fp32. Steps that overflow change nothing, the very first one among them."""
    training = started(budget_bytes=BUDGET, parameters=half_parameters(dtype))
    training.active = managed
    optimizer, scaler = keeping(MASTER_OPTIMIZERS[name](training.parameters)), Scaler()
    expected = Textbook(half_parameters(dtype), MASTER_OPTIMIZERS[name])
    for step in range(12):
        scale = scaler.get_scale()
        scaler.set_gradients(training.parameters, step)
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.get_scale() < scale) == (step in OVERFLOWS)
        if step not in OVERFLOWS:
            set_most_gradients(expected.parameters, step, scale)
            expected.step(1 / scale)
    assert differences(optimizer, expected) == []
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
    if managed:
        assert any(block.state is State.OFFLOADED for block in training.states().values())
        assert training.pager.account.peak_bytes <= BUDGET


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused amsgrad", "SGD fused"])
def test_gradients_that_the_user_has_unscaled_and_clipped(started: Start, name: str) -> None:
    """In bf16: PyTorch unscales no gradients in fp16."""
    training = started(budget_bytes=BUDGET, parameters=half_parameters(torch.bfloat16))
    optimizer, scaler = keeping(MASTER_OPTIMIZERS[name](training.parameters)), Scaler()
    expected = Textbook(half_parameters(torch.bfloat16), MASTER_OPTIMIZERS[name])
    for step in range(8):
        scaler.set_gradients(training.parameters, step)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(training.parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step not in OVERFLOWS:
            set_most_gradients(expected.parameters, step)
            nn.utils.clip_grad_norm_(expected.parameters, 1.0)
            expected.step()
    assert differences(optimizer, expected) == []


def test_a_copy_of_an_optimizer_has_to_be_given_again() -> None:
    """With its parameters, as for the best weights so far."""
    parameters = half_parameters(torch.bfloat16)
    optimizer = keeping(torch.optim.AdamW(parameters))
    for step in range(3):
        set_most_gradients(parameters, step)
        optimizer.step()
    copied, copies = copy.deepcopy((optimizer, parameters))
    keeping(copied)
    for step in range(3, 6):
        set_most_gradients(copies, step)
        copied.step()
    assert differences(copied, Textbook(half_parameters(torch.bfloat16), torch.optim.AdamW).train(6)) == []
    assert differences(optimizer, Textbook(half_parameters(torch.bfloat16), torch.optim.AdamW).train(3)) == []


# -- what is refused


class Own(Optimizer):
    """Of a user's own."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


def differentiable(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, differentiable=True)


def hooked(parameters: list[nn.Parameter]) -> Optimizer:
    optimizer = torch.optim.AdamW(parameters)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.LBFGS, "LBFGS cannot be updated over fp32 copies: its update is not known to treat each parameter by it"),
        (Own, "Own cannot be updated over fp32 copies: its update is not known"),
        (differentiable, "SGD cannot be updated over fp32 copies: it is differentiable"),
        (hooked, "there are step hooks besides teraio's; use an optimizer of torch.optim that updates each parameter by itself"),
    ],
)
def test_optimizers_that_cannot_be_updated_by_parts(make: Callable[..., Optimizer], reason: str) -> None:
    """When they are given, and then nothing has changed."""
    optimizer = make(half_parameters(torch.bfloat16))
    with pytest.raises(UnsupportedError, match=reason):
        teraio.manage_optimizer(optimizer, master_weights=True)
    assert not hasattr(optimizer, "_step_supports_amp_scaling")
    assert not optimizer._optimizer_load_state_dict_pre_hooks and len(optimizer._optimizer_step_pre_hooks) == (make is hooked)


@pytest.mark.parametrize("managed", [True, False])
@pytest.mark.parametrize("how", ["post hook", "global hook"])
def test_steps_that_cannot_be_run_by_parts(started: Start, managed: bool, how: str) -> None:
    """When they are called; they change nothing, and the next step works."""
    training = started(budget_bytes=None, parameters=half_parameters(torch.bfloat16))
    optimizer = keeping(torch.optim.AdamW(training.parameters))
    for step in range(2):
        set_most_gradients(training.parameters, step)
        optimizer.step()
    training.active = managed
    before = [p.detach().clone() for p in training.parameters]
    set_most_gradients(training.parameters, 2)
    with contextlib.ExitStack() as hooks:
        if how == "post hook":
            hooks.callback(optimizer.register_step_post_hook(lambda *_: None).remove)
        else:
            hooks.callback(register_optimizer_step_post_hook(lambda *_: None).remove)
        with pytest.raises(UnsupportedError, match="there are step hooks"):
            optimizer.step()
    assert all(map(torch.equal, before, training.parameters))
    assert all(block.pins == 0 for block in training.pager.blocks)
    optimizer.step()
    assert differences(optimizer, Textbook(half_parameters(torch.bfloat16), torch.optim.AdamW).train(3)) == []


def test_asking_twice_is_asking_once() -> None:
    optimizer = torch.optim.AdamW(half_parameters(torch.bfloat16))
    for masters in (True, True, False):
        teraio.manage_optimizer(optimizer, master_weights=masters)
        assert len(optimizer._optimizer_step_pre_hooks) == 1
