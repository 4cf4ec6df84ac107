"""Memory that was given away before the first compiled call stays where it is; nothing else does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.dlpack import to_dlpack

import teraio

from ..training import MIB, blocks

SAID = "was given away before the first compiled call"


def stack() -> nn.Sequential:
    """Eight weights of 1 MiB, the last of them frozen."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    model[7].requires_grad_(False)
    return model


def train(model: nn.Module, folder: Path) -> None:
    optimizer = torch.optim.Adam(parameter for parameter in model.parameters() if parameter.requires_grad)
    teraio.compile(model, memory_budget=14 * MIB, storage=folder, codegen="eager")
    for _ in range(2):
        model(torch.randn(16, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert teraio.status()[0].moved_bytes["device->storage"] > 0


def by_numpy(weight: Tensor) -> Any:
    return np.from_dlpack(weight.detach())


def by_torch(weight: Tensor) -> Any:
    return torch.from_dlpack(weight.detach()).numpy()


@pytest.mark.parametrize("export", [by_numpy, by_torch])
def test_what_was_given_away_shows_what_is_trained(export: Callable[[Tensor], Any], tmp_path: Path, caplog: Any) -> None:
    model = stack()
    before = model[2].weight.detach().clone()
    held = export(model[2].weight)
    train(model, tmp_path)
    assert np.array_equal(held, model[2].weight.detach().numpy()) and not torch.equal(before, model[2].weight)
    said = [record.message for record in caplog.records if SAID in record.message]
    assert len(said) == 1 and "2.weight" in said[0]
    assert {block.name for block in blocks() if block.kind == "parameter" and block.size_bytes >= MIB and block.span is None} == {
        "2.weight"
    }


def test_a_frozen_weight_that_was_given_away_itself(tmp_path: Path, caplog: Any) -> None:
    model = stack()
    held = torch.from_dlpack(model[7].weight)
    train(model, tmp_path)
    assert torch.equal(held, model[7].weight) and held.data_ptr() == model[7].weight.data_ptr()
    assert SAID in caplog.text


def test_after_a_reset_it_may_move_again(tmp_path: Path, caplog: Any) -> None:
    model = stack()
    held = np.from_dlpack(model[2].weight.detach())
    train(model, tmp_path)
    del held
    teraio.reset()
    caplog.clear()
    train(model, tmp_path)
    assert SAID not in caplog.text


def nothing(model: nn.Module) -> None:
    pass


def aliases(model: nn.Module) -> Any:
    data = [parameter.data for parameter in model.parameters()]
    return data, model.state_dict(), copy.deepcopy(model), [each.view(-1) for each in data]


def a_backward_pass_that_is_due(model: nn.Module) -> Tensor:
    model[7].requires_grad_(True)
    return model(torch.randn(4, 512)).sum()  # type: ignore[no-any-return]


def a_training_step(model: nn.Module) -> Tensor:
    loss = model(torch.randn(4, 512)).sum()
    loss.backward()
    torch.optim.Adam(model.parameters()).step()
    return loss  # type: ignore[no-any-return]


def a_capsule_that_is_gone(model: nn.Module) -> None:
    for parameter in model.parameters():
        to_dlpack(parameter.detach())


@pytest.mark.parametrize("before", [nothing, aliases, a_backward_pass_that_is_due, a_training_step, a_capsule_that_is_gone])
def test_no_false_alarms(before: Callable[[nn.Module], Any], tmp_path: Path, caplog: Any) -> None:
    model = stack()
    held = before(model)
    train(model, tmp_path)
    del held
    assert SAID not in caplog.text
    assert all(block.span is not None for block in blocks() if block.kind == "parameter" and block.size_bytes >= MIB)


def test_the_budget_that_an_error_names_counts_what_was_given_away(tmp_path: Path) -> None:
    model = stack()
    held = [by_numpy(layer.weight) for layer in model]

    def compiled(budget: int) -> nn.Module:
        teraio.reset()
        torch._dynamo.reset()
        return teraio.compile(model, memory_budget=budget, storage=tmp_path, codegen="eager")

    with pytest.raises(teraio.BudgetError) as caught:
        compiled(MIB)(torch.randn(16, 512))
    assert caught.value.smallest_bytes >= len(held) * MIB
    compiled(caught.value.smallest_bytes)(torch.randn(16, 512)).square().mean().backward()
