"""Steps by subgroups and as a whole: what room they take, which optimizers are managed, what is known of them, and what stays."""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from planner.errors import BudgetError
from runtime.device import CpuDevice
from runtime.paging import Pager
from teraio.optimizer import SubgroupSizes

from ...training import random_rows, unequal, weights_of_1_mib
from .managed_training import ManagedTraining, Start
from .plain_training import (
    OPTIMIZERS,
    SIZE,
    adamw,
    differing,
    everything,
    nine_parameters,
    parameters_of,
    plain,
    set_gradients,
    set_most_gradients,
    square_parameters,
    state_bytes,
    two_groups,
)


@contextmanager
def stepping(budget_bytes: int | None = None) -> Iterator[ManagedTraining]:
    """Subgroup stepping over nine parameters, all of which but the last have gradients."""
    sizes, parameters = SubgroupSizes(used_bytes=4 * SIZE), nine_parameters()
    training = ManagedTraining(Pager(mover=None, budget_bytes=budget_bytes), parameters, sizes=sizes)
    set_most_gradients(parameters, 0)
    yield training
    training.steps.close()


OPTIMIZERS_WITH_MORE_STATE = {
    **{name: OPTIMIZERS[name] for name in ("AdamW foreach", "SGD momentum", "Adagrad", "ASGD", "Rprop")},
    "AdamW amsgrad fused": two_groups(torch.optim.AdamW, amsgrad=True, fused=True),
    "RMSprop all": two_groups(torch.optim.RMSprop, momentum=0.9, centered=True, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS_WITH_MORE_STATE)
def test_new_state_was_reserved_before_it_was_made(name: str) -> None:
    """The count never jumps over what was reserved, else the first step could break the budget."""
    with stepping() as steps:
        optimizer, account = OPTIMIZERS_WITH_MORE_STATE[name](steps.parameters), steps.pager.account
        reserved: list[int] = []
        acquire = steps.pager.acquire

        def noting_acquire(blocks: Any, new_bytes: int, what: str, **more: Any) -> None:
            acquire(blocks, new_bytes, what, **more)
            reserved.append(account.used_bytes + account.fixed_bytes + new_bytes)

        steps.pager.acquire = noting_acquire  # type: ignore[method-assign]
        optimizer.step()
        small = 100 * len(steps.parameters)  # step counters
        needed = sum(p.nbytes + (p.grad.nbytes if p.grad is not None else 0) for p in steps.parameters)
        assert account.fixed_bytes == state_bytes(optimizer)
        assert account.used_bytes + account.fixed_bytes <= max(reserved) + small
        assert account.peak_bytes >= needed + state_bytes(optimizer) - small


def lbfgs(parameters: list[nn.Parameter]) -> Optimizer:
    """It looks at all parameters at once."""
    optimizer = torch.optim.LBFGS(parameters[:7])
    optimizer.step = functools.partial(optimizer.step, lambda: torch.zeros(()))  # type: ignore[method-assign]
    return optimizer


@pytest.mark.parametrize(("make", "active"), [(lbfgs, True), (torch.optim.AdamW, False)])
def test_a_step_that_is_left_as_it_is(make: Callable[[Any], Optimizer], active: bool) -> None:
    """It ends the iteration all the same."""
    with stepping() as steps:
        steps.active = active
        optimizer = make(steps.parameters)
        optimizer.step()
        assert steps.stage_names() == [] and steps.finished == [optimizer]
        assert all(block.pins == 0 for block in steps.pager.blocks)


# -- which optimizers are managed, and how those are that cannot be cut


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
    assert caplog.messages == [
        "AdamW is updated as a whole: its update is not known to treat each parameter by itself (if it does, promise that: "
        "manage_optimizer(optimizer, independent='elements' or 'parameters'))"
    ]
    assert not differing(everything(optimizer), plain(5, make=AdamW))
    assert all(block.pins == 0 for block in training.pager.blocks)
    wholes = [[s.name for s in i.stages if s.phase == "optimizer"] for i in training.iterations]
    assert wholes[-1] == ([] if budget == 8 * SIZE else ["optimizer/whole"])
    if wholes[-1]:
        trace = training.profile().trace
        states = [block for block in trace.blocks if block.kind == "optimizer_state"]
        assert len(states) == 6 and all(block.persistent and block.reads == block.writes == (1,) for block in states)


def test_on_a_gpu_a_whole_step_that_does_not_fit_is_refused(started: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "asynchronous", True)
    training = started(budget_bytes=8 * SIZE)
    optimizer = torch.optim.AdamW(training.parameters)
    training.train(optimizer, 2)
    optimizer.register_step_post_hook(lambda *_: None)
    before = everything(optimizer)
    set_gradients(training.parameters, 2)
    with pytest.raises(BudgetError) as raised:
        optimizer.step()
    assert "optimizer/AdamW, which is updated as a whole because there are step hooks besides teraio's" in str(raised.value)
    assert f"give a memory_budget of at least {raised.value.smallest_bytes} bytes" in str(raised.value)
    assert not differing(everything(optimizer), before)
    training.pager.account.budget_bytes = raised.value.smallest_bytes
    optimizer.step()
    assert training.pager.account.peak_bytes <= raised.value.smallest_bytes
    assert not differing(everything(optimizer), plain(3))


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
    assert not differing(everything(optimizer), plain(3, make=AdamW))


# -- what is known of an optimizer: it keeps nothing alive, groups come back as they were, and cuts follow the sizes


def test_what_is_known_keeps_nothing_alive(started: Start) -> None:
    training = started(2, budget_bytes=None)
    optimizer = adamw(square_parameters(2))
    training.steps.manage(optimizer)
    parameters = parameters_of(optimizer)
    for parameter in parameters:
        training.pager.block_of(parameter, name="other", kind="parameter", user_visible=True)
    set_gradients(parameters, 0)
    optimizer.step()
    managed = training.steps._optimizers.of(optimizer)
    assert managed.load_hook is not None and managed.has_blocks and managed.facts.optimizer is optimizer
    gone = [weakref.ref(optimizer), *(weakref.ref(p) for p in parameters), weakref.ref(optimizer.state[parameters[0]]["exp_avg"])]
    del optimizer, parameters, parameter
    gc.collect()
    assert [each() for each in gone] == [None] * 4
    with pytest.raises(ReferenceError):
        _ = managed.facts.optimizer


# -- `torch.compile(optimizer.step)`: Dynamo compiles none of teraio's functions, and the bits are those of the plain step

PACKAGES = tuple(str(Path(__file__).parents[3] / name) for name in ("teraio", "runtime", "planner"))
STEPS = 10
"""More than Dynamo compiles one function for."""


def train(options: dict[str, Any] | None, optimizer: type[torch.optim.Optimizer], compiled: bool, closure: bool) -> list[Tensor]:
    training = weights_of_1_mib(options, count=3, kind=optimizer, lr=0.01)
    (stepping,) = training.optimizers
    step: Callable[..., Any] = torch.compile(stepping.step, backend="eager") if compiled else stepping.step

    def one(batch: Tensor, index: int) -> None:
        def passes() -> Tensor:
            stepping.zero_grad()
            loss = training.model(batch).square().mean()
            loss.backward()
            return loss.detach()

        if closure:
            step(passes)
        else:
            passes()
            step()

    training.run(random_rows(STEPS), one)
    assert options is None or training.states_moved or optimizer is torch.optim.SGD, "the model is compiled by teraio"
    return list(training.finish().values())


def code_that_dynamo_saw() -> set[tuple[str, str]]:
    codes = [code for seen in torch._dynamo.convert_frame.input_codes.seen if (code := seen()) is not None]
    return {(code.co_filename, code.co_name) for code in codes}


@pytest.mark.parametrize(("optimizer", "closure"), [(torch.optim.AdamW, True), (torch.optim.SGD, False)])
def test_dynamo_sees_none_of_teraio_s_functions(
    optimizer: type[torch.optim.Optimizer], closure: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = train({"memory_budget": "9MiB", "storage": tmp_path}, optimizer, compiled=True, closure=closure)
    assert code_that_dynamo_saw(), "the step is compiled"
    assert not [each for each in code_that_dynamo_saw() if each[0].startswith(PACKAGES)]
    assert "recompile_limit" not in caplog.text
    assert not unequal(found, train(None, optimizer, compiled=False, closure=closure))
