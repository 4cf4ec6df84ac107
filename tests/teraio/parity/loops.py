"""What users do between forward, backward and update, to parameters and gradients, and where a step breaks off."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import teraio

from .harness import PLANNED_STEPS, Batch, Run, one_update, plain_step, sgd
from .models import Chain

Step = Callable[[Run, Batch, int], None]


def update(run: Run, *losses: Tensor) -> None:
    """Backward passes, and the optimizer's step. Records losses and gradients."""
    for loss in losses:
        loss.backward()
        run.record_loss(loss)
    run.record_gradients()
    run.optimizer.step()


def accumulate(run: Run, batch: Batch, index: int) -> None:
    """Two passes to an update, whose gradients are clipped; they are zeroed and kept."""
    run.optimizer.zero_grad(set_to_none=False)
    for parameter in run.module.parameters() if index else ():
        assert parameter.grad is not None and not bool(parameter.grad.any())
    for inputs, targets in zip(*(part.chunk(2) for part in batch), strict=True):
        run.backward((inputs, targets), 0.5)
        run.record_gradients()
    run.record("norm", nn.utils.clip_grad_norm_(run.module.parameters(), 0.05))
    run.optimizer.step()


class WithLoss(Chain):
    """Returns its loss."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return functional.cross_entropy(super().forward(x), targets)


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
    run.module.get_parameter("layers.1.up.weight").data.mul_(0.9)
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
    run.module.get_parameter("layers.1.up.weight").detach().numpy()[2, :] = 0.02


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


def freeze_and_thaw(run: Run, batch: Batch, index: int) -> None:
    """Layer 1 trains in the first and the last step only."""
    layer = run.module.get_submodule("layers.1")
    layer.requires_grad_(index in (0, 3))
    plain_step(run, batch, index)


def train_in_turns(run: Run, batch: Batch, index: int) -> None:
    """An iteration of one model, then one of the other, each with its own optimizer.

    In every other step nothing is shared: one model trains while the other one's blocks wait.
    """
    inputs, targets = batch
    optimizers = run.kept.setdefault("optimizers", [sgd(child) for child in run.module.children()])
    coder, judge = run.module.get_submodule("coder"), run.module.get_submodule("judge")
    together: list[Callable[[], Tensor]] = [
        lambda: functional.cross_entropy(judge(coder(inputs)), targets),
        lambda: functional.cross_entropy(judge(coder(inputs).detach()), targets.flip(0)),
    ]
    apart: list[Callable[[], Tensor]] = [
        lambda: functional.cross_entropy(coder(inputs), targets % 64),
        lambda: functional.cross_entropy(judge(inputs.flip(0)), targets % 64),
    ]
    for optimizer, objective in zip(optimizers, apart if index % 2 else together, strict=True):
        optimizer.zero_grad()
        loss = objective()
        loss.backward()
        run.record_loss(loss)
        run.record_gradients()
        optimizer.step()


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
    update(run, functional.cross_entropy(logits, batch[1]))


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
    rows, fuse = run.module.upper.row, run.module.fuse
    rows.copy_(batch[1] % 64)
    if index in BROKEN_STEPS:
        rows[5] = 64
        with pytest.raises(IndexError, match="index out of range"):
            run.loss(batch)
        rows[5] = 0
        with pytest.raises(Interrupted):  # a forward pass whose backward never comes; its loss lives on until the next break
            run.kept["left"] = run.loss(batch)
            raise Interrupted
        run.optimizer.zero_grad()
        loss = run.loss(batch)
        fuse.armed = True
        with pytest.raises(Interrupted) as raised:  # between two compiled backward graphs
            loss.backward()
        fuse.armed = False
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


# -- loops other than a pass and a step of one optimizer


def no_optimizers(module: nn.Module) -> list[Optimizer]:
    return []


def by_hand(run: Run, x: Tensor, index: int) -> None:
    """Updates the parameters, and drops the gradients."""
    run.backward(x)
    with torch.no_grad():
        for parameter in run.module.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.01)
                parameter.grad = None


def told(run: Run, x: Tensor, index: int) -> None:
    """Two passes before an update; gradients are zeroed in place."""
    for half in x.chunk(2):
        run.backward(half, 0.5)
    with torch.no_grad():
        for parameter in run.module.parameters():
            if parameter.grad is not None:
                parameter.data -= 0.01 * parameter.grad
                parameter.grad.zero_()
    teraio.step_done()


def rollout(run: Run, x: Tensor, index: int) -> None:
    """As in PPO: three updates by what the model has made itself."""
    with torch.no_grad():
        for _ in range(2):
            x = run.model(x)
    for _ in range(3):
        one_update(run, x, index)


def generate(run: Run, x: Tensor, index: int) -> None:
    """More passes without gradients than are recorded, and an update."""
    with torch.no_grad():
        for _ in range(66):
            x = run.model(x)
    one_update(run, x, index)


def infer(run: Run, x: Tensor, index: int) -> None:
    with torch.no_grad():
        run.record("output", run.model(x))


def closure_of(run: Run, x: Tensor) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        run.optimizer.zero_grad()
        run.kept["loss"] = run.backward(x).detach()
        return run.kept["loss"]

    return closure


def with_closure(run: Run, x: Tensor, index: int) -> None:
    """Forward and backward run inside the step, as in Lightning's loop; it returns the loss."""
    count = len(run.losses)
    loss = run.optimizer.step(closure_of(run, x)) if index % 2 else run.optimizer.step(closure=closure_of(run, x))
    assert len(run.losses) == count + 1, "the closure has run once"
    assert loss is run.kept["loss"]
