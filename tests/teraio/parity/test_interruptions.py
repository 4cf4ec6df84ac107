"""Parity when an exception breaks a step, in every place where one can, and training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .harness import PLANNED_STEPS, Batch, Case, Run, check_parity, compiled_input_needs_grad, plain_step
from .models import Chain, features

BROKEN_STEPS = (1, PLANNED_STEPS + 1)
"""One on demand and, in planned cases, one under the plan, which the first one delays by a step."""
STEPS = PLANNED_STEPS + 3


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
    """Two compiled halves with a fuse between, whose backward runs between those of the halves."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = Chain(outputs=64)
        self.fuse = Fuse()
        self.upper = Chain()

    def forward(self, x: Tensor) -> Tensor:
        return self.upper(self.fuse(self.lower(x)))


def break_backward(run: Run, batch: Batch, index: int) -> None:
    """A backward that raises between two compiled graphs, then the same batch anew."""
    if index in BROKEN_STEPS:
        fuse = run.module.get_submodule("fuse")
        run.optimizer.zero_grad()
        loss = run.loss(batch)
        fuse.armed = True
        with pytest.raises(Interrupted) as raised:
            loss.backward()
        fuse.armed = False
        run.record_gradients()  # of the upper half only
        run.kept["raised"] = raised  # as a notebook would: the traceback holds on to the frame's tensors
        run.kept["loss"] = loss
    plain_step(run, batch, index)


@compiled_input_needs_grad
def test_an_exception_in_backward(tmp_path: Path) -> None:
    case = Case(
        make_model=FusedChain,
        make_batches=features,
        compile_parts=("lower", "upper"),
        step=break_backward,
        planned=True,
        steps=STEPS,
    )
    result = check_parity(case, tmp_path)
    broken = result.gradients[BROKEN_STEPS[0]]
    assert "upper.layers.0.up.weight" in broken
    assert "lower.layers.0.up.weight" not in broken


def break_accumulation(run: Run, batch: Batch, index: int) -> None:
    """A hook on one parameter raises after the compiled backward, while its gradients are accumulated."""
    if index in BROKEN_STEPS:

        def hook(_: Tensor) -> None:
            raise Interrupted

        handle = run.module.get_parameter("layers.1.up.weight").register_post_accumulate_grad_hook(hook)
        run.optimizer.zero_grad()
        with pytest.raises(Interrupted):
            run.loss(batch).backward()
        handle.remove()
    plain_step(run, batch, index)


def test_an_exception_in_a_gradient_hook(tmp_path: Path) -> None:
    case = Case(
        make_model=Chain,
        make_batches=features,
        step=break_accumulation,
        planned=True,
        steps=STEPS,
    )
    check_parity(case, tmp_path)


def break_after_forward(run: Run, batch: Batch, index: int) -> None:
    """A forward pass whose backward never comes; its loss lives on until the next break."""
    if index in BROKEN_STEPS:
        with pytest.raises(Interrupted):
            run.kept["loss"] = run.loss(batch)
            raise Interrupted
    plain_step(run, batch, index)


def test_an_exception_between_forward_and_backward(tmp_path: Path) -> None:
    case = Case(
        make_model=Chain,
        make_batches=features,
        step=break_after_forward,
        planned=True,
        steps=STEPS,
    )
    check_parity(case, tmp_path)


class Lookup(nn.Module):
    """Two halves with a table lookup between: a row that it does not have raises amid the forward graph."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = Chain(outputs=64)
        self.table = nn.Embedding(64, 64)
        self.upper = Chain()
        self.row = torch.zeros(320, dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        return self.upper(self.lower(x) + self.table(self.row))


def break_forward(run: Run, batch: Batch, index: int) -> None:
    rows = run.module.row  # type: ignore[union-attr]
    rows.copy_(batch[1] % 64)
    if index in BROKEN_STEPS:
        rows[5] = 64
        with pytest.raises(IndexError, match="index out of range"):
            run.loss(batch)
        rows.copy_(batch[1] % 64)
    plain_step(run, batch, index)


def test_an_exception_in_a_stage_of_the_forward_graph(tmp_path: Path) -> None:
    check_parity(Case(make_model=Lookup, make_batches=features, step=break_forward), tmp_path)


def break_before_the_update(run: Run, batch: Batch, index: int) -> None:
    """The iteration ends without an optimizer step: gradients are thrown away and the next one begins."""
    if index in BROKEN_STEPS:
        run.optimizer.zero_grad()
        with pytest.raises(Interrupted):
            run.loss(batch).backward()
            run.record_gradients()
            raise Interrupted
    plain_step(run, batch, index)


def test_an_exception_before_the_update(tmp_path: Path) -> None:
    case = Case(
        make_model=Chain,
        make_batches=features,
        step=break_before_the_update,
        planned=True,
        steps=STEPS,
    )
    check_parity(case, tmp_path)
