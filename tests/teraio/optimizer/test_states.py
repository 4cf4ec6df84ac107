"""Optimizer states are blocks: what becomes one, and that they and gradients move and come back."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.errors import BudgetError
from runtime.paging import Block, Pager
from teraio.optimizer.facts import owned_parameters
from teraio.optimizer.subgroup_steps import GradientVersions

from .managed_training import Start
from .plain_training import KIB, SIZE, differing, everything, plain, set_gradients, square_parameters, state_bytes


def test_states_are_blocks_and_counters_are_not(started: Start) -> None:
    training = started(2, budget_bytes=None)
    optimizer = torch.optim.AdamW(training.parameters)
    training.train(optimizer, 2)
    states = training.states()
    assert set(states) == {f"optimizer/layer.{n}.{name}" for n in range(2) for name in ("exp_avg", "exp_avg_sq")}
    assert all(block.size_bytes == SIZE and block.user_visible for block in states.values())
    assert training.pager.account.fixed_bytes == state_bytes(optimizer) - 4 * SIZE == 2 * 4
    first, second = (iteration.stages for iteration in training.iterations)
    made = [block for stage in first for block in stage.made]
    assert sorted(block.name for block in made) == sorted(states)
    assert not any(stage.made for stage in second)
    assert all(block in stage.read and block in stage.written for stage in second for block in made if block in stage.read)
    assert {block for stage in second for block in stage.written} >= set(made)


def test_the_peak_stays_within_the_budget(started: Start) -> None:
    """Gradients of user code come from outside; what is counted here is what the steps bring in."""
    training = started(budget_bytes=None)
    set_gradients(training.parameters, 0)
    optimizer = torch.optim.AdamW(training.parameters)
    training.pager.account.budget_bytes = KIB
    with pytest.raises(BudgetError, match=r"stage 'optimizer/subgroup.0' needs .* at once; give a") as raised:
        optimizer.step()
    smallest = raised.value.smallest_bytes
    assert 6 * SIZE <= smallest <= 6 * SIZE + 16 * 6, "one parameter, its gradient, two states, two temporaries, and counters"
    assert not optimizer.state and all(block.pins == 0 for block in training.pager.blocks)
    training.pager.account.budget_bytes = smallest - 1
    with pytest.raises(BudgetError):
        optimizer.step()
    assert not optimizer.state
    training.pager.account.budget_bytes = smallest
    training.train(optimizer, 6)
    assert training.pager.account.peak_bytes <= smallest
    assert not differing(everything(optimizer), plain(6))


# -- overlap


def test_the_next_ones_arrive_and_those_before_leave_while_one_updates(started: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the fifth step, of eight subgroups. Each update takes as long as a copy."""
    training = started(8, budget_bytes=20 * SIZE)
    optimizer = torch.optim.AdamW(training.parameters)
    training.train(optimizer, 4)
    seen: list[set[tuple[str, str]]] = []
    retire = training.pager.retire

    def noting(*args: Any, **more: Any) -> None:
        training.finish_one()
        seen.append({(copy.kind, copy.block.name) for copy in training.mover.flying})
        retire(*args, **more)

    monkeypatch.setattr(training.pager, "retire", noting)
    training.train(optimizer, 1, first=4)
    assert len(seen) == 8 and not differing(everything(optimizer), plain(5, square_parameters(8)))
    both = 0
    for number, flying in enumerate(seen):
        following = names(number + 1) | {f"layer.{number + 1}", f"optimizer/gradient.{number + 1}"}
        arriving = {name for kind, name in flying if kind == "in"}
        leaving = {name for kind, name in flying if kind == "out"}
        assert arriving <= following and not leaving & (following | names(number))
        both += bool(arriving and leaving)
    assert both >= 4, seen


def names(number: int) -> set[str]:
    return {f"optimizer/layer.{number}.exp_avg", f"optimizer/layer.{number}.exp_avg_sq"}


# -- what user code does


def test_loaded_states_take_the_place_of_the_old_ones(started: Start) -> None:
    """Also in the plan; the old blocks are gone, the new ones count at once."""
    training = started(budget_bytes=20 * SIZE)
    optimizer = torch.optim.AdamW(training.parameters)
    training.train(optimizer, 4)
    before = training.states()
    training.observer.plan.follow(None, {})
    training.observer.plan._by_id = {number: block for number, block in enumerate(before.values())}
    for number, block in enumerate(before.values()):
        block.trace_id = number
    content = optimizer.state_dict()
    content["state"] = {
        number: {name: value.clone() for name, value in state.items()} for number, state in content["state"].items()
    }
    optimizer.load_state_dict(content)
    del content
    after = training.states()
    assert after.keys() == before.keys() and not set(after.values()) & set(before.values())
    assert [training.observer.plan._by_id[n] for n in range(len(after))] == [after[name] for name in before]
    assert [after[name].uses for name in before] == [block.uses for block in before.values()]
    training.train(optimizer, 2, first=4)
    assert not differing(everything(optimizer), plain(6))


def test_an_optimizer_that_is_gone_counts_no_more(started: Start) -> None:
    training = started(2, budget_bytes=None)
    first = torch.optim.AdamW(training.parameters)
    training.train(first, 1)
    del first
    gc.collect()
    second = torch.optim.SGD(training.parameters, lr=0.1)
    training.train(second, 1)
    assert training.states() == {} and training.pager.account.fixed_bytes == 0


# -- gradients that an update has only read are still what their copies say


def parameters_with_gradients(*gradients: Tensor) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.ones(gradient.shape)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return parameters


def blocks_of(pager: Pager, parameters: list[nn.Parameter]) -> list[Block]:
    return [pager.block_of(p.grad, name="gradient", kind="gradient", user_visible=True) for p in parameters if p.grad is not None]


def gradients_of(pager: Pager, optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, Block | None]]:
    """Return the gradients of an optimizer's parameters, each with its block."""
    found = [owned.tensor.grad for owned in owned_parameters(optimizer)]
    return [(gradient, pager.known_block(gradient)) for gradient in found if gradient is not None]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.SGD, {"foreach": True}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.Adagrad, {"foreach": True, "maximize": True}),
        (torch.optim.RMSprop, {"weight_decay": 0.1, "foreach": False}),
    ],
)
def test_updates_that_only_read(kind: type[torch.optim.Optimizer], settings: dict[str, object]) -> None:
    """None of these may count as changed that is not, and none as unchanged that is."""
    pager, parameters = Pager(mover=None, budget_bytes=None), parameters_with_gradients(torch.rand(8), torch.rand(4))
    optimizer = kind(parameters, lr=0.1, **settings)  # type: ignore[call-arg]
    blocks = blocks_of(pager, parameters)
    before = [p.grad.clone() for p in parameters if p.grad is not None]
    versions = GradientVersions(optimizer, gradients_of(pager, optimizer))
    optimizer.step()
    assert versions.unchanged() == set(blocks)
    assert all(p.grad is not None and torch.equal(p.grad, b) for p, b in zip(parameters, before, strict=True))


def test_an_update_that_writes() -> None:
    """Fused, of gradients that a GradScaler has scaled: it divides them in place."""
    pager, parameters = Pager(mover=None, budget_bytes=None), parameters_with_gradients(torch.rand(8))
    optimizer = torch.optim.AdamW(parameters, fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)  # type: ignore[attr-defined]
    blocks_of(pager, parameters)
    before = next(p.grad.clone() for p in parameters if p.grad is not None)
    versions = GradientVersions(optimizer, gradients_of(pager, optimizer))
    optimizer.step()
    assert parameters[0].grad is not None and torch.allclose(parameters[0].grad, before / 2)
    assert versions.unchanged() == set()


def test_one_of_several_gradients_in_a_storage_is_enough() -> None:
    pager, flat = Pager(mover=None, budget_bytes=None), torch.rand(16)
    alias = torch.empty(0).set_(flat.untyped_storage(), 8, (8,))  # counts its writes by itself
    optimizer = torch.optim.SGD(parameters_with_gradients(flat[:8], alias), lr=0.1)
    (block,) = set(blocks_of(pager, optimizer.param_groups[0]["params"]))
    versions = GradientVersions(optimizer, gradients_of(pager, optimizer))
    assert versions.unchanged() == {block}
    alias.zero_()
    assert versions.unchanged() == set()
