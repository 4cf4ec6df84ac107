"""Loops other than a pass and a step of one optimizer: they get to a plan, with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import teraio

from ...training import begin
from .optimizers import Case, Run, check

pytestmark = pytest.mark.usefixtures("fine_and_quick")


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


@pytest.mark.parametrize(("step", "steps"), [(by_hand, 14), (told, 7)])
def test_a_plan_is_followed(step: Any, steps: int, tmp_path: Path) -> None:
    result = check(Case(make=no_optimizers, step=step, steps=steps, layers=4, planned=True), tmp_path, states=0, fraction=0.6)
    assert result.status.waiting_for is None
    assert result.status.deviations == 0 and sum(result.status.moved_bytes.values()) > 0


def update(run: Run, x: Tensor, optimizer: Optimizer) -> None:
    run.backward(x)
    optimizer.step()
    optimizer.zero_grad()


def rollout(run: Run, x: Tensor, index: int) -> None:
    """As in PPO: three updates by what the model has made itself."""
    with torch.no_grad():
        for _ in range(2):
            x = run.model(x)
    for _ in range(3):
        update(run, x, run.optimizers[0])


def task(run: Run, x: Tensor, index: int) -> None:
    """As in Reptile: a new optimizer takes steps for a task, then the parameters go back most of the way."""
    before = [parameter.detach().clone() for parameter in run.module.parameters()]
    optimizer = torch.optim.SGD(run.module.parameters(), lr=0.01)
    for _ in range(2):
        update(run, x, optimizer)
    with torch.no_grad():
        for parameter, old in zip(run.module.parameters(), before, strict=True):
            parameter.copy_(old.lerp(parameter, 0.1))


def generate(run: Run, x: Tensor, index: int) -> None:
    """More passes without gradients than are recorded, and an update."""
    with torch.no_grad():
        for _ in range(70):
            x = run.model(x)
    update(run, x, run.optimizers[0])


def infer(run: Run, x: Tensor, index: int) -> None:
    with torch.no_grad():
        run.values.append(run.model(x).clone())


def adam(module: nn.Module) -> list[Optimizer]:
    return [torch.optim.Adam(module.parameters(), lr=1e-3)]


@pytest.mark.parametrize(
    ("make", "step", "steps"), [(adam, rollout, 12), (no_optimizers, task, 6), (adam, generate, 12), (no_optimizers, infer, 42)]
)
def test_what_repeats_gets_a_plan(make: Any, step: Any, steps: int, tmp_path: Path) -> None:
    result = check(Case(make=make, step=step, steps=steps, layers=4, planned=True), tmp_path, states=0, fraction=0.6)
    assert result.status.phase == "planned" and result.status.waiting_for is None
    assert sum(result.status.moved_bytes.values()) > 0


def test_status_tells_what_a_run_waits_for(tmp_path: Path) -> None:
    """Gradients that pile up may be those of one update: teraio waits for its end."""
    training = begin(lambda: nn.Linear(1024, 1024), no_optimizers, {"memory_budget": 64 << 20, "storage": str(tmp_path)})
    for _ in range(6):
        training.model(torch.ones(2, 1024)).sum().backward()
    (status,) = teraio.status()
    assert status.phase == "profile" and status.iterations == 0
    assert status.waiting_for == (
        "the end of an iteration: the step of a torch.optim optimizer over parameters of the compiled model, or "
        "teraio.step_done() after your own update (5 passes so far)"
    )
    assert status.movable_bytes >= 8 << 20 and 0 < status.immovable_bytes < 1 << 20
    teraio.step_done()
    (status,) = teraio.status()
    assert status.iterations == 1 and status.waiting_for is not None
    assert status.waiting_for.startswith("4 iterations in a row that run the same graphs (0 so far); the last ones did not count")
