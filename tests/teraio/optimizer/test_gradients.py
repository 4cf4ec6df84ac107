"""Gradients that an update has only read are still what their copies say."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from runtime.paging import Block, Pager
from teraio.optimizer.subgroup_steps import GradientVersions

from .managed_training import Start
from .plain_training import SIZE, everything, plain, same, square_parameters


def parameters_with_gradients(*gradients: Tensor) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.ones(gradient.shape)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return parameters


def blocks_of(pager: Pager, parameters: list[nn.Parameter]) -> list[Block]:
    return [pager.block_of(p.grad, name="gradient", kind="gradient", user_visible=True) for p in parameters if p.grad is not None]


@pytest.mark.parametrize(
    "settings",
    [{"foreach": False}, {"foreach": True}, {"foreach": True, "maximize": True}, {"weight_decay": 0.1, "foreach": False}],
    ids=str,
)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_updates_that_only_read(kind: type[torch.optim.Optimizer], settings: dict[str, object]) -> None:
    """None of these may count as changed that is not, and none as unchanged that is."""
    pager, parameters = Pager(mover=None, budget_bytes=None), parameters_with_gradients(torch.rand(8), torch.rand(4))
    optimizer = kind(parameters, lr=0.1, **settings)  # type: ignore[call-arg]
    blocks = blocks_of(pager, parameters)
    before = [p.grad.clone() for p in parameters if p.grad is not None]
    versions = GradientVersions(optimizer)
    optimizer.step()
    assert versions.unchanged(pager.known_block) == set(blocks)
    assert all(p.grad is not None and torch.equal(p.grad, b) for p, b in zip(parameters, before, strict=True))


def test_an_update_that_writes() -> None:
    """Fused, of gradients that a GradScaler has scaled: it divides them in place."""
    pager, parameters = Pager(mover=None, budget_bytes=None), parameters_with_gradients(torch.rand(8))
    optimizer = torch.optim.AdamW(parameters, fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)  # type: ignore[attr-defined]
    blocks_of(pager, parameters)
    before = next(p.grad.clone() for p in parameters if p.grad is not None)
    versions = GradientVersions(optimizer)
    optimizer.step()
    assert parameters[0].grad is not None and torch.allclose(parameters[0].grad, before / 2)
    assert versions.unchanged(pager.known_block) == set()


def test_one_of_several_gradients_in_a_storage_is_enough() -> None:
    pager, flat = Pager(mover=None, budget_bytes=None), torch.rand(16)
    alias = torch.empty(0).set_(flat.untyped_storage(), 8, (8,))  # counts its writes by itself
    optimizer = torch.optim.SGD(parameters_with_gradients(flat[:8], alias), lr=0.1)
    (block,) = set(blocks_of(pager, optimizer.param_groups[0]["params"]))
    versions = GradientVersions(optimizer)
    assert versions.unchanged(pager.known_block) == {block}
    alias.zero_()
    assert versions.unchanged(pager.known_block) == set()


def test_without_gradients_or_blocks() -> None:
    pager, parameters = Pager(mover=None, budget_bytes=None), [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    parameters[0].grad = torch.rand(2)
    assert GradientVersions(torch.optim.SGD(parameters, lr=0.1)).unchanged(pager.known_block) == set()
    with torch.inference_mode():
        parameters[1].grad = torch.rand(2)
    assert GradientVersions(torch.optim.SGD(parameters, lr=0.1)).unchanged(pager.known_block) == set()


def test_none_goes_out_again_after_its_update(started: Start) -> None:
    """They come back for it, and have to make room again before user code frees them."""
    training = started(8, budget_bytes=14 * SIZE)
    optimizer = torch.optim.AdamW(training.parameters)
    training.train(optimizer, 2)
    training.mover.log.clear()
    training.train(optimizer, 1, first=2)
    copies = Counter(line for line in training.mover.log if "gradient" in line and not line.startswith("drop"))
    assert any(line.startswith("in ") for line in copies) and max(copies.values()) == 1
    values = everything(optimizer)
    training.steps.close()
    assert same(values, plain(3, square_parameters(8)))
