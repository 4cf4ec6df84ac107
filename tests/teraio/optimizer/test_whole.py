"""Which optimizers are managed, and how those are that cannot be cut."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from planner.errors import BudgetError

from .managed_training import Start
from .plain_training import SIZE, everything, plain, same, set_gradients, square_parameters, state_bytes


def test_off_and_chosen(started: Start) -> None:
    training = started(2, budget_bytes=None, automatic=False)
    optimizer = torch.optim.AdamW(training.parameters)
    training.train(optimizer, 2)
    assert training.states() == {} and training.pager.account.fixed_bytes == state_bytes(optimizer)
    assert all(stage.phase != "optimizer" for iteration in training.iterations for stage in iteration.stages)
    training.steps.manage(optimizer)
    assert len(training.states()) == 4 and training.pager.account.fixed_bytes == 2 * 4, "at once"
    training.train(optimizer, 1, first=2)
    assert "optimizer" in [stage.phase for stage in training.iterations[-1].stages]
    assert same(everything(optimizer), plain(3, square_parameters(2)))


def test_what_is_chosen_before_its_parameters_are_known(started: Start) -> None:
    training = started(2, budget_bytes=None)
    later = square_parameters(2)
    optimizer = torch.optim.Adagrad(later)
    training.steps.manage(optimizer)
    assert training.states() == {}
    for parameter in later:
        training.pager.block_of(parameter, name="later", kind="parameter", user_visible=True)
    training.steps.between_regions()
    assert set(training.states()) == {"optimizer/later.sum"}
    assert sum(block.kind == "optimizer_state" for block in training.pager.blocks) == 2


class AdamW(Optimizer):
    """Of a user's own, with the name of one that can be split: puts a new tensor in place of its state in every step."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                state["mean"] = 0.9 * state.get("mean", torch.zeros_like(parameter)) + parameter.grad
                parameter -= 0.1 * state["mean"]


@pytest.mark.parametrize("budget", [None, 30 * SIZE, 8 * SIZE], ids=["no limit", "fits", "does not fit"])
def test_an_optimizer_of_the_user_s_own(started: Start, budget: int | None, caplog: pytest.LogCaptureFixture) -> None:
    training = started(budget_bytes=budget)
    optimizer = AdamW(training.parameters)
    with caplog.at_level(logging.INFO, logger="teraio"):
        training.train(optimizer, 5)
    assert caplog.messages == ["AdamW is updated as a whole: its update is not known to treat each parameter by itself"]
    assert same(everything(optimizer), plain(5, make=AdamW))
    assert all(block.pins == 0 for block in training.pager.blocks)
    wholes = [[s.name for s in i.stages if s.phase == "optimizer"] for i in training.iterations]
    assert wholes[-1] == ([] if budget == 8 * SIZE else ["optimizer/whole"])
    if wholes[-1]:
        trace = training.profile().trace
        states = [block for block in trace.blocks if block.kind == "optimizer_state"]
        assert len(states) == 6 and all(block.persistent and block.reads == block.writes == (1,) for block in states)


def test_on_a_gpu_a_whole_step_that_does_not_fit_is_refused(started: Start) -> None:
    training = started(budget_bytes=8 * SIZE, gpu=True)
    optimizer = torch.optim.AdamW(training.parameters)
    training.train(optimizer, 2)
    optimizer.register_step_post_hook(lambda *_: None)
    before = everything(optimizer)
    set_gradients(training.parameters, 2)
    with pytest.raises(BudgetError) as raised:
        optimizer.step()
    assert "optimizer/AdamW, which is updated as a whole because there are step hooks besides teraio's" in str(raised.value)
    assert f"give a memory_budget of at least {raised.value.smallest_bytes} bytes" in str(raised.value)
    assert same(everything(optimizer), before)
    training.pager.account.budget_bytes = raised.value.smallest_bytes
    optimizer.step()
    assert training.pager.account.peak_bytes <= raised.value.smallest_bytes
    assert same(everything(optimizer), plain(3))


def test_a_whole_step_that_fails_holds_nothing(started: Start) -> None:
    training = started(budget_bytes=30 * SIZE)

    class Failing(AdamW):
        fail = True

        def step(self, closure: Any = None) -> None:
            if self.fail:
                raise ArithmeticError
            AdamW.step.__wrapped__(self)  # type: ignore[attr-defined]

    optimizer = Failing(training.parameters)
    set_gradients(training.parameters, 0)
    with pytest.raises(ArithmeticError):
        optimizer.step()
    assert all(block.pins == 1 for block in training.pager.blocks)
    training.steps.between_regions()
    assert all(block.pins == 0 for block in training.pager.blocks)
    with pytest.raises(ArithmeticError):
        optimizer.step()
    optimizer.fail = False
    training.train(optimizer, 3)
    assert all(block.pins == 0 for block in training.pager.blocks)
    assert same(everything(optimizer), plain(3, make=AdamW))
