"""Steps by subgroups without any lower tier: what room they take, and which optimizers and steps they leave alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from planner.errors import BudgetError
from runtime.paging import Pager
from teraio.optimizer import SubgroupSizes

from .managed_training import ManagedTraining
from .plain_training import (
    KIB,
    OPTIMIZERS,
    SIZE,
    everything,
    nine_parameters,
    same,
    set_gradients,
    set_most_gradients,
    state_bytes,
    two_groups,
)


@contextmanager
def stepping(budget_bytes: int | None = None) -> Iterator[ManagedTraining]:
    """Subgroup stepping over nine parameters, all of which but the last have gradients."""
    sizes, parameters = SubgroupSizes(given_bytes=4 * SIZE), nine_parameters()
    training = ManagedTraining(Pager(mover=None, budget_bytes=budget_bytes), parameters, sizes=sizes)
    set_most_gradients(parameters, 0)
    yield training
    training.steps.close()


OPTIMIZERS_WITH_MORE_STATE = {
    **OPTIMIZERS,
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


@pytest.mark.parametrize("name", ["AdamW", "AdamW foreach", "SGD", "SGD momentum", "AdamW amsgrad"])
def test_a_budget_that_the_state_does_not_fit_in(name: str) -> None:
    """Refused before anything is changed; the smallest budget that the error names is not too small."""
    with stepping(budget_bytes=1 * KIB) as steps:
        before = [p.detach().clone() for p in steps.parameters]
        optimizer = OPTIMIZERS[name](steps.parameters)
        with pytest.raises(BudgetError) as raised:
            optimizer.step()
        assert not optimizer.state and all(map(torch.equal, before, steps.parameters))
        assert all(block.pins == 0 for block in steps.pager.blocks)
        steps.pager.account.budget_bytes = raised.value.smallest_bytes
        optimizer.step()
        assert steps.pager.account.peak_bytes <= steps.pager.account.budget_bytes


def test_several_optimizers() -> None:
    def run(parameters: list[nn.Parameter]) -> dict[str, torch.Tensor]:
        first, second = torch.optim.AdamW(parameters[:4]), torch.optim.SGD(parameters[4:], lr=0.1)
        for step in range(2):
            set_most_gradients(parameters, step)
            first.step()
            second.step()
        return everything(first, second)

    with stepping() as steps:
        found = run(steps.parameters)
        assert len(steps.finished) == 4
    assert same(found, run(nine_parameters()))


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


def test_a_global_pre_hook_of_the_user() -> None:
    seen: list[int] = []
    with stepping() as steps:
        handle = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(len(optimizer.param_groups[0]["params"])))
        torch.optim.AdamW(steps.parameters).step()
        handle.remove()
    assert seen == [9]


def test_parameters_of_others_are_left_alone_and_closing_unhooks() -> None:
    with stepping() as steps:
        theirs = nine_parameters()
        set_gradients(theirs, 0)
        torch.optim.AdamW(theirs).step()
        steps.steps.close()
        torch.optim.AdamW(steps.parameters).step()
        assert steps.finished == [] and steps.pager.account.fixed_bytes == 0
