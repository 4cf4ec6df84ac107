"""Parity when user code reads, writes, saves or replaces parameters and gradients amid compiled regions."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import teraio

from .harness import MIB, Batch, Case, Run, budgeted_options, check_budget, check_exact, check_parity, plain_step, train
from .models import Chain, ConvNet, features, images

Step = Callable[[Run, Batch, int], None]


def chain_case(step: Step, *, planned: bool = False, steps: int | None = None) -> Case:
    return Case(make_model=Chain, make_batches=features, step=step, planned=planned, steps=steps)


def test_references_held_over_steps_are_never_stale(tmp_path: Path) -> None:
    """A state dict, a slice and a numpy view taken before the first step show every later value."""

    def step(run: Run, batch: Batch, index: int) -> None:
        weight = run.module.get_parameter("layers.1.down.weight")
        if index == 0:
            run.kept |= {
                "state": run.module.state_dict(),
                "rows": weight.detach()[3:5],
                "array": weight.detach().numpy(),
            }
        before = weight.detach().clone()
        plain_step(run, batch, index)
        assert not torch.equal(weight, before), "the step trained nothing"
        state = run.kept["state"]
        assert all(torch.equal(state[name], value) for name, value in run.module.named_parameters())
        assert torch.equal(run.kept["rows"], weight[3:5])
        assert torch.equal(torch.from_numpy(run.kept["array"]), weight)
        run.record("rows", run.kept["rows"])

    check_parity(chain_case(step, planned=True), tmp_path)


def write_between_steps(run: Run, batch: Batch, index: int) -> None:
    """Shrink all parameters in place, by every way of writing."""
    plain_step(run, batch, index)
    first, *others = run.module.parameters()
    first.data.mul_(0.9)
    with torch.no_grad():
        torch._foreach_mul_(others, 0.95)
        run.module.get_parameter("layers.0.down.weight")[7].fill_(0.01)
    run.module.get_parameter("layers.2.up.weight").detach().numpy()[2, :] = 0.02


def test_in_place_writes_between_steps_are_respected(tmp_path: Path) -> None:
    check_parity(chain_case(write_between_steps, planned=True), tmp_path, debug=True)


def write_between_passes(run: Run, batch: Batch, index: int) -> None:
    """Scale a parameter between forward and backward (`.data`, or autograd would object), then gradients."""
    run.optimizer.zero_grad()
    loss = run.loss(batch)
    run.module.get_parameter("layers.2.up.weight").data.mul_(0.9)
    loss.backward()
    for parameter in run.module.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5).add_(parameter.detach(), alpha=1e-2)
    run.record_loss(loss)
    run.record_gradients()
    run.optimizer.step()


def test_in_place_writes_amid_a_step_are_respected(tmp_path: Path) -> None:
    check_parity(chain_case(write_between_passes, planned=True), tmp_path)


def replace_storage(run: Run, batch: Batch, index: int) -> None:
    """Give a parameter new memory, and a gradient that the user made; the old blocks are gone."""
    weight = run.module.get_parameter("layers.1.down.weight")
    weight.data = weight.detach().flip(0).contiguous() * 0.5
    run.optimizer.zero_grad()
    loss = run.loss(batch)
    loss.backward()
    weight.grad = weight.grad.clone() * 2 if weight.grad is not None else None
    run.record_loss(loss)
    run.record_gradients()
    run.optimizer.step()


def test_replaced_parameters_and_gradients(tmp_path: Path) -> None:
    check_parity(chain_case(replace_storage), tmp_path, debug=True)


def test_saving_and_loading(tmp_path: Path) -> None:
    """What `torch.save` writes after a step is what the parameters are; loading it takes training back."""
    path = tmp_path / "checkpoint.pt"

    def step(run: Run, batch: Batch, index: int) -> None:
        plain_step(run, batch, index)
        if index == 1:
            torch.save({"model": run.module.state_dict(), "optimizer": run.optimizer.state_dict()}, path)
            saved = torch.load(path)["model"]
            assert all(torch.equal(saved[name], value) for name, value in run.module.named_parameters())
        if index == 5:
            saved = torch.load(path)
            run.module.load_state_dict(saved["model"])
            run.optimizer.load_state_dict(saved["optimizer"])
            assert all(torch.equal(saved["model"][name], value) for name, value in run.module.named_parameters())
            run.record("restored", run.module.get_parameter("layers.0.up.weight"))

    check_parity(chain_case(step, planned=True), tmp_path)


def average(run: Run, batch: Batch, index: int) -> None:
    """Keep a deep copy of the model as a moving average, and evaluate it without compiling."""
    plain_step(run, batch, index)
    mean: nn.Module = run.kept.setdefault("mean", copy.deepcopy(run.module))
    with torch.no_grad():
        for kept, current in zip(mean.parameters(), run.module.parameters(), strict=True):
            kept.lerp_(current, 0.5)
        run.record("logits of the average", mean(batch[0]))


def test_moving_average_of_the_parameters(tmp_path: Path) -> None:
    check_parity(chain_case(average), tmp_path)


def test_the_uncompiled_module_runs_on_the_same_parameters(tmp_path: Path) -> None:
    """Eager code over the managed parameters: a forward and backward beside the compiled one."""

    def step(run: Run, batch: Batch, index: int) -> None:
        plain_step(run, batch, index)
        run.optimizer.zero_grad()
        loss = run.case.compute_loss(run.module, batch)
        loss.backward()
        run.record_loss(loss)
        run.record_gradients()

    check_parity(chain_case(step), tmp_path)


def stateless_sgd(module: nn.Module) -> Optimizer:
    """No states, and a small model: a stage of the graphs sets the floor, not the update."""
    return torch.optim.SGD(module.parameters(), lr=0.05)


def smallest_budget(case: Case, tmp_path: Path) -> teraio.BudgetError:
    """The error that a budget of 1 MiB meets."""
    with pytest.raises(teraio.BudgetError) as raised:
        train(case, backend="teraio", options=budgeted_options(case, tmp_path, budget=MIB, codegen="eager"))
    return raised.value


def test_the_smallest_budget_works_and_less_is_refused(tmp_path: Path) -> None:
    case = Case(make_model=ConvNet, make_batches=images, make_optimizer=stateless_sgd)
    error = smallest_budget(case, tmp_path)
    assert error.smallest_bytes > MIB
    assert str(error.smallest_bytes) in str(error)
    assert "forward/" in str(error) or "backward/" in str(error), "names no stage"
    assert len(error.largest) == 3 and error.largest[0][0] == error.stage and error.largest[0][1] <= error.smallest_bytes
    assert [size for _, size in error.largest] == sorted((size for _, size in error.largest), reverse=True)
    assert all(repr(name) in str(error) for name, _ in error.largest)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.largest) == (str(error), error.largest)
    options = budgeted_options(case, tmp_path, budget=error.smallest_bytes, codegen="eager")
    budgeted = train(case, backend="teraio", options=options)
    check_budget(budgeted, error.smallest_bytes)
    check_exact(budgeted, train(case, backend="teraio", options={"codegen": "eager", "storage": str(tmp_path)}))
    with pytest.raises(teraio.BudgetError):
        train(case, backend="teraio", options=options | {"memory_budget": (budgeted.progress[0][0].floor_bytes or 0) - 1})
