"""Loops whose updates are not steps of `torch.optim`: they get to a plan, with the same bits."""

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
