"""Masters in checkpoints: saved and loaded bit for bit, and what becomes of checkpoints of other optimizers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from planner.errors import UnsupportedError
from teraio.optimizer import keep_masters

from .managed_training import Start
from .plain_training import HALF, MASTER_OPTIMIZERS, WIDE, Textbook, differences, half_parameters, keeping, named, train_most

BUDGET = 14 * WIDE


def copied(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """As it is read from a file."""
    torch.save(content, folder / "optimizer.pt")
    loaded: dict[str, Any] = torch.load(folder / "optimizer.pt")
    return loaded


def same_values(parameters: list[nn.Parameter], others: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter, other in zip(parameters, others, strict=True):
            parameter.copy_(other)


def test_loading_in_the_middle_of_a_training(started: Start, tmp_path: Path) -> None:
    """What is loaded takes the place of the blocks that were there; hooks of the user's see plain tensors."""
    training = started(budget_bytes=BUDGET, parameters=half_parameters(torch.bfloat16))
    optimizer = torch.optim.AdamW(training.parameters)
    keeping(optimizer)
    train_most(training.parameters, optimizer, 4)
    content = copied(optimizer.state_dict(), tmp_path)
    values = [p.detach().clone() for p in training.parameters]
    train_most(training.parameters, optimizer, 3, 4)
    before = set(training.states().values())
    seen: list[bool] = []
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.extend(map(torch.is_tensor, named(state).values())))
    optimizer.load_state_dict(content)
    with torch.no_grad():
        for parameter, value in zip(training.parameters, values, strict=True):
            parameter.copy_(value)
    assert seen and all(seen) and len(seen) == len(named(content))
    assert not before & set(training.states().values())
    train_most(training.parameters, optimizer, 4, 4)
    assert differences(optimizer, Textbook(half_parameters(torch.bfloat16), torch.optim.AdamW).train(8)) == []


def plainly_trained(name: str) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    parameters = half_parameters(torch.bfloat16)
    optimizer = MASTER_OPTIMIZERS[name](parameters)
    train_most(parameters, optimizer, 5)
    return parameters, optimizer


@pytest.mark.parametrize("way", ["loaded", "taken over", "taken over, managed before"])
@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "Adagrad"])
def test_states_of_an_optimizer_without_masters(started: Start, name: str, way: str) -> None:
    """They become fp32, and masters are made from the parameters."""
    parameters, plain = plainly_trained(name)
    expected = Textbook(half_parameters(torch.bfloat16), MASTER_OPTIMIZERS[name])
    with torch.no_grad():
        for master, parameter in zip(expected.masters, parameters, strict=True):
            master.copy_(parameter)
    expected.optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    if name == "Adagrad" and way != "loaded":  # what has not been used yet begins as it would have in fp32
        expected.optimizer.state[expected.masters[-1]]["sum"].fill_(0.1)
    if way == "loaded":
        training = started(budget_bytes=BUDGET, parameters=half_parameters(torch.bfloat16))
        optimizer = keeping(MASTER_OPTIMIZERS[name](training.parameters))
        optimizer.load_state_dict(plain.state_dict())
        same_values(training.parameters, parameters)
    else:
        training = started(budget_bytes=BUDGET, parameters=parameters)
        if way == "taken over, managed before":
            training.steps.manage(plain)
        optimizer = keeping(plain)
    states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert states and all(value.dtype is torch.float32 for value in states)
    train_most(training.parameters, optimizer, 5, 5)
    assert differences(optimizer, expected.train(5, 5)) == []
    assert training.pager.account.peak_bytes <= BUDGET


def test_states_that_wait_elsewhere_are_brought_in_to_be_cast() -> None:
    """On a GPU, what waits on a drive cannot be read where it is."""
    parameters, plain = plainly_trained("AdamW")
    expected = {name: value.float() for name, value in named(plain.state_dict()).items()}
    away = {value: value.clone() for name, value in named(plain.state_dict()).items() if value.dtype in HALF}
    for value in away:
        value.fill_(torch.nan)

    @contextlib.contextmanager
    def on_device(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        held = list(tensors)
        for value in held:
            value.copy_(away[value])
        yield
        for value in held:
            value.fill_(torch.nan)

    keep_masters(plain, on_device)
    found = named(plain.state_dict())
    assert away and found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", ["AdamW", "SGD momentum"])
def test_a_plain_optimizer_loads_a_checkpoint_with_masters(name: str) -> None:
    """It rounds the states, as ever, and takes no notice of the masters."""
    trained = half_parameters(torch.bfloat16)
    keeper = keeping(MASTER_OPTIMIZERS[name](trained))
    train_most(trained, keeper, 5)
    content = keeper.state_dict()
    without = {n: {k: v.clone() for k, v in s.items() if k != "master_param"} for n, s in content["state"].items()}
    results = []
    for state in (copy.deepcopy(content["state"]), without):
        parameters = half_parameters(torch.bfloat16)
        same_values(parameters, trained)
        plain = MASTER_OPTIMIZERS[name](parameters)
        plain.load_state_dict({**content, "state": state})
        assert all(v.dtype in HALF for p in parameters[:2] for k, v in plain.state[p].items() if k != "step")
        train_most(parameters, plain, 5, 5)
        results.append(parameters)
    assert all(map(torch.equal, *results))


def test_states_that_load_state_dict_has_rounded_are_refused() -> None:
    parameters = half_parameters(torch.bfloat16)
    keeper = keeping(torch.optim.AdamW(parameters))
    train_most(parameters, keeper, 2)
    late = torch.optim.AdamW(half_parameters(torch.bfloat16))
    late.load_state_dict(keeper.state_dict())
    with pytest.raises(UnsupportedError, match=r"master_param is not fp32, because load_state_dict .* first, then load"):
        keeping(late)
    assert all(v.dtype in HALF for k, v in named(late.state_dict()).items() if "exp" in k and not k.endswith(" 5"))


def test_a_checkpoint_that_does_not_fit_changes_nothing() -> None:
    parameters = half_parameters(torch.bfloat16)
    keeper = keeping(torch.optim.AdamW(parameters))
    train_most(parameters, keeper, 2)
    content = keeper.state_dict()
    content["param_groups"] = [{**content["param_groups"][0], "params": [0]}]
    with pytest.raises(ValueError, match="size of optimizer's group"):
        keeper.load_state_dict(content)
    train_most(parameters, keeper, 2, 2)
    assert differences(keeper, Textbook(half_parameters(torch.bfloat16), torch.optim.AdamW).train(4)) == []
