"""Parity over what users do between forward, backward and update, to parameters and gradients, and when a step breaks off."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import teraio

from .harness import (
    MIB,
    PLANNED_STEPS,
    Batch,
    Case,
    Run,
    budgeted_options,
    check_budget,
    check_exact,
    check_parity,
    compiled_input_needs_grad,
    plain_step,
    train,
)
from .models import Chain, ConvNet, features, features_of_changing_size, images

Step = Callable[[Run, Batch, int], None]


def update(run: Run, *losses: Tensor) -> None:
    """Backward passes, and the optimizer's step. Records losses and gradients."""
    for loss in losses:
        loss.backward()
        run.record_loss(loss)
    run.record_gradients()
    run.optimizer.step()


# -- loops that repeat, until a plan is followed


def accumulate(run: Run, batch: Batch, index: int) -> None:
    """Two passes to an update, whose gradients are clipped; they are zeroed and kept."""
    run.optimizer.zero_grad(set_to_none=False)
    for parameter in run.module.parameters() if index else ():
        assert parameter.grad is not None and not bool(parameter.grad.any())
    for inputs, targets in zip(*(part.chunk(2) for part in batch), strict=True):
        loss = run.loss((inputs, targets)) / 2
        loss.backward()
        run.record_loss(loss)
        run.record_gradients()
    run.record("norm", torch.nn.utils.clip_grad_norm_(run.module.parameters(), 0.05))
    run.optimizer.step()


class WithLoss(Chain):
    """Returns its loss."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return torch.nn.functional.cross_entropy(super().forward(x), targets)


def keep_the_loss(run: Run, batch: Batch, index: int) -> None:
    """Until the next one, as in an ordinary loop: the stage that makes the loss makes activations, too."""
    run.optimizer.zero_grad()
    run.kept["loss"] = run.model(*batch)
    update(run, run.kept["loss"])


def hold_and_write(run: Run, batch: Batch, index: int) -> None:
    """A state dict, a slice and a numpy view show every later value; and what is written by every way is respected.

    Between forward and backward (by `.data`, or autograd would object), to gradients, and between steps.
    """
    weight = run.module.get_parameter("layers.1.down.weight")
    if index == 0:
        run.kept |= {"state": run.module.state_dict(), "rows": weight.detach()[3:5], "array": weight.detach().numpy()}
    before = weight.detach().clone()
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
    assert not torch.equal(weight, before), "the step trained nothing"
    assert all(torch.equal(run.kept["state"][name], value) for name, value in run.module.named_parameters())
    assert torch.equal(run.kept["rows"], weight[3:5]) and torch.equal(torch.from_numpy(run.kept["array"]), weight)
    run.record("rows", run.kept["rows"])
    first, *others = run.module.parameters()
    first.data.mul_(0.9)
    with torch.no_grad():
        torch._foreach_mul_(others, 0.95)
        run.module.get_parameter("layers.0.down.weight")[7].fill_(0.01)
    run.module.get_parameter("layers.2.up.weight").detach().numpy()[2, :] = 0.02


def save_and_load(run: Run, batch: Batch, index: int) -> None:
    """What `torch.save` writes after a step is what the parameters are; loading it takes training back."""
    plain_step(run, batch, index)
    if index == 1:
        run.kept["file"] = io.BytesIO()
        torch.save({"model": run.module.state_dict(), "optimizer": run.optimizer.state_dict()}, run.kept["file"])
    if index in (1, 5):
        run.kept["file"].seek(0)
        saved = torch.load(run.kept["file"])
        if index == 5:
            run.module.load_state_dict(saved["model"])
            run.optimizer.load_state_dict(saved["optimizer"])
            run.record("restored", run.module.get_parameter("layers.0.up.weight"))
        assert all(torch.equal(saved["model"][name], value) for name, value in run.module.named_parameters())


def leave_the_plan(run: Run, batch: Batch, index: int) -> None:
    """From when it is followed on: a pass without gradients amid the saved activations, then one to three passes to an update."""
    if index < PLANNED_STEPS:
        plain_step(run, batch, index)
        return
    run.optimizer.zero_grad()
    for number in range(1 + index % 3):
        loss = run.loss(batch)
        if number == 0:
            with torch.no_grad():
                run.record("loss in between", run.loss(batch))
        loss.backward()
        run.record_loss(loss)
    run.record_gradients()
    run.optimizer.step()


PLANNED = {
    "accumulation, clipping, zeroed gradients": Case(
        make_model=Chain, make_batches=lambda count: features(count, batch=640), step=accumulate
    ),
    "a loss that is kept": Case(make_model=lambda: WithLoss(outputs=1024, depth=2), make_batches=features, step=keep_the_loss),
    "references and writes": Case(make_model=Chain, make_batches=features, step=hold_and_write),
    "a checkpoint": Case(make_model=Chain, make_batches=features, step=save_and_load),
    "passes that are not in the plan": Case(make_model=Chain, make_batches=features, step=leave_the_plan, steps=11),
}


@pytest.mark.parametrize("name", PLANNED)
def test_loops_that_get_a_plan(name: str, tmp_path: Path) -> None:
    result = check_parity(replace(PLANNED[name], planned=True), tmp_path, debug="writes" in name)
    assert all(float(norm) > 0.05 for name, norm in result.observed if name == "norm"), "nothing was clipped"


# -- one after the other, on demand


def backward_twice(run: Run, batch: Batch, index: int) -> None:
    """The second backward reads the activations that the first one kept, and adds to the gradients."""
    loss = run.loss(batch)
    loss.backward(retain_graph=True)
    run.record_gradients()
    update(run, loss)


def two_losses_at_once(run: Run, batch: Batch, index: int) -> None:
    """Two forward passes, then both backwards, in the order of the passes and in the reverse one by turns."""
    losses = [run.loss(batch), run.loss((batch[0].flip(0), batch[1]))]
    update(run, *(losses if index // 2 % 2 else reversed(losses)))


def keep_outputs(run: Run, batch: Batch, index: int) -> None:
    """Logits that the user holds on to neither change nor vanish while later steps page."""
    logits = run.model(batch[0])
    run.kept.setdefault("held", []).append((logits, logits.detach().clone()))
    update(run, torch.nn.functional.cross_entropy(logits, batch[1]))


def differentiate_by_function(run: Run, batch: Batch, index: int) -> None:
    """`torch.autograd.grad` in place of `backward`: gradients that belong to the user alone."""
    parameters = list(run.module.parameters())
    loss = run.loss(batch)
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    run.record_loss(loss)
    update(run)


def replace_storage(run: Run, batch: Batch, index: int) -> None:
    """Give a parameter new memory, and a gradient that the user made; the old blocks are gone."""
    weight = run.module.get_parameter("layers.1.down.weight")
    weight.data = weight.detach().flip(0).contiguous() * 0.5
    loss = run.loss(batch)
    loss.backward()
    weight.grad = weight.grad.clone() * 2 if weight.grad is not None else None
    run.record_loss(loss)
    update(run)


def average(run: Run, batch: Batch, index: int) -> None:
    """Keep a deep copy of the model as a moving average, and evaluate it without compiling."""
    update(run, run.loss(batch))
    mean: nn.Module = run.kept.setdefault("mean", copy.deepcopy(run.module))
    with torch.no_grad():
        for kept, current in zip(mean.parameters(), run.module.parameters(), strict=True):
            kept.lerp_(current, 0.5)
        run.record("logits of the average", mean(batch[0]))


def run_eagerly(run: Run, batch: Batch, index: int) -> None:
    """The uncompiled module over the managed parameters, forward and backward, beside the compiled one."""
    update(run, run.loss(batch))
    run.optimizer.zero_grad()
    loss = run.case.compute_loss(run.module, batch)
    loss.backward()
    run.record_loss(loss)
    run.record_gradients()


def evaluate_then_train(run: Run, batch: Batch, index: int) -> None:
    """A pass in evaluation mode without gradients before the step: dropout is off in it and on after it."""
    run.module.eval()
    with torch.no_grad():
        run.record("loss in evaluation", run.loss(batch))
        run.record("logits in evaluation", run.model(batch[0]))
    run.module.train()
    update(run, run.loss(batch))


TURNS: list[Step] = [
    backward_twice,
    two_losses_at_once,
    keep_outputs,
    differentiate_by_function,
    replace_storage,
    average,
    run_eagerly,
    evaluate_then_train,
]


def in_turns(run: Run, batch: Batch, index: int) -> None:
    run.optimizer.zero_grad()
    TURNS[index % len(TURNS)](run, batch, index)
    for logits, values in run.kept.get("held", ()):
        assert torch.equal(logits, values)
        run.record("held logits", logits)


@pytest.mark.usefixtures("eager_dropout")
def test_loops_that_do_something_else_each_time(tmp_path: Path) -> None:
    case = Case(make_model=lambda: Chain(dropout=0.1), make_batches=features, step=in_turns, steps=2 * len(TURNS))
    check_parity(case, tmp_path, debug=True)


@pytest.mark.parametrize("dynamic", [None, False], ids=["automatic-dynamic", "static"])
def test_changing_batch_size(tmp_path: Path, dynamic: bool | None) -> None:
    case = Case(
        make_model=lambda: Chain(depth=2),
        make_batches=features_of_changing_size,
        compile_options={"dynamic": dynamic},
        steps=6,
    )
    check_parity(case, tmp_path)


# -- steps that an exception breaks off, and training goes on

BROKEN_STEPS = (1, PLANNED_STEPS + 1)
"""One on demand and one under the plan, which the first one delays by a step."""


class Interrupted(Exception):
    """Raised by the tests; nothing else raises it."""


class Fuse(nn.Module):
    """The identity, whose backward raises Interrupted while `armed`."""

    armed = False

    def forward(self, x: Tensor) -> Tensor:
        return _Burn.apply(x, self)


class _Burn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fuse: Fuse) -> Tensor:
        ctx.fuse = fuse
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.fuse.armed:
            raise Interrupted
        return gradient, None


class FusedChain(nn.Module):
    """Two compiled halves with a fuse between, whose backward runs between those of the halves. The upper one begins with a table
    lookup: a row that it does not have raises amid its forward graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.fuse, self.upper = Chain(outputs=64), Fuse(), Lookup()

    def forward(self, x: Tensor) -> Tensor:
        return self.upper(self.fuse(self.lower(x)))


class Lookup(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.row = nn.Embedding(64, 64), torch.zeros(320, dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(x) + self.table(self.row))


def break_off(run: Run, batch: Batch, index: int) -> None:
    """In every place where an exception can do so, then the same batch once more."""
    rows, fuse = run.module.get_submodule("upper").row, run.module.get_submodule("fuse")
    rows.copy_(batch[1] % 64)  # type: ignore[operator, union-attr]
    if index in BROKEN_STEPS:
        rows[5] = 64  # type: ignore[index, operator]
        with pytest.raises(IndexError, match="index out of range"):
            run.loss(batch)
        rows[5] = 0  # type: ignore[index, operator]
        with pytest.raises(Interrupted):  # a forward pass whose backward never comes; its loss lives on until the next break
            run.kept["left"] = run.loss(batch)
            raise Interrupted
        run.optimizer.zero_grad()
        loss = run.loss(batch)
        fuse.armed = True  # type: ignore[assignment]
        with pytest.raises(Interrupted) as raised:  # between two compiled backward graphs
            loss.backward()
        fuse.armed = False  # type: ignore[assignment]
        run.record_gradients()  # of the upper half only
        run.kept |= {"raised": raised, "loss": loss}  # as a notebook would: the traceback holds on to the frame's tensors

        def hook(_: Tensor) -> None:
            raise Interrupted

        handle = run.module.get_parameter("lower.layers.1.up.weight").register_post_accumulate_grad_hook(hook)
        run.optimizer.zero_grad()
        with pytest.raises(Interrupted):  # after a compiled backward, while its gradients are accumulated
            run.loss(batch).backward()
        handle.remove()
        run.optimizer.zero_grad()
        with pytest.raises(Interrupted):  # before the update: gradients are thrown away
            run.loss(batch).backward()
            run.record_gradients()
            raise Interrupted
    plain_step(run, batch, index)


@compiled_input_needs_grad
def test_exceptions_in_a_step(tmp_path: Path) -> None:
    case = Case(
        make_model=FusedChain,
        make_batches=features,
        compile_parts=("lower", "upper"),
        step=break_off,
        planned=True,
        steps=PLANNED_STEPS + 4,
    )
    result = check_parity(case, tmp_path, fraction=0.05)  # what is kept of broken steps is in the peak
    broken = result.gradients[BROKEN_STEPS[0]]
    assert "upper.layers.0.up.weight" in broken and "lower.layers.0.up.weight" not in broken


# -- the smallest budget


def stateless(module: nn.Module) -> torch.optim.Optimizer:
    """No states, and a small model: a stage of the graphs sets the floor, not the update."""
    return torch.optim.SGD(module.parameters(), lr=0.05)


def test_the_smallest_budget_works_and_less_is_refused(tmp_path: Path) -> None:
    case = Case(
        make_model=ConvNet, make_batches=images, make_optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.05)
    )
    with pytest.raises(teraio.BudgetError) as raised:
        train(case, backend="teraio", options=budgeted_options(case, tmp_path, budget=MIB, codegen="eager"))
    error = raised.value
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
