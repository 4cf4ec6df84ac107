"""Steps that are given a closure, as Lightning's loop does: managed like all others, with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .optimizers import MIB, Case, Run, check, one, train, unmanaged

pytestmark = pytest.mark.usefixtures("fine_and_quick")


def closure_of(run: Run, x: Tensor) -> Any:
    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        run.optimizers[0].zero_grad()
        run.backward(x)
        return run.values[-1]

    return closure


def with_closure(run: Run, x: Tensor, index: int) -> None:
    """Forward and backward run inside the step, which returns the loss."""
    count = len(run.values)
    loss = run.optimizers[0].step(closure_of(run, x)) if index % 2 else run.optimizers[0].step(closure=closure_of(run, x))
    assert len(run.values) == count + 1, "the closure has run once"
    assert loss is run.values[-1]


def clipping(run: Run, x: Tensor, index: int) -> None:
    """The closure clips, as Lightning's does; every third step gets none. One that fails updates nothing."""
    closure = closure_of(run, x)

    def clipped() -> Tensor:
        loss: Tensor = closure()
        nn.utils.clip_grad_norm_(run.module.parameters(), 0.05)
        return loss

    if index == 2:
        with pytest.raises(ZeroDivisionError):
            run.optimizers[0].step(lambda: 1 / 0)
    if index % 3:
        run.optimizers[0].step(clipped)
    else:
        clipped()
        run.optimizers[0].step()


@pytest.mark.parametrize(("step", "planned"), [(with_closure, True), (clipping, False)])
def test_states_move(step: Any, planned: bool, tmp_path: Path) -> None:
    check(Case(make=one(torch.optim.AdamW), step=step, planned=planned, steps=10), tmp_path, states=6)


def test_updates_inside_the_backward_pass(tmp_path: Path) -> None:
    case = Case(make=one(torch.optim.AdamW), step=with_closure, planned=True, steps=16)
    result = check(case, tmp_path, states=1, overlap_step=True)
    assert min(result.gradients[:3]) > 0 and set(result.gradients[3:]) == {0}


def test_with_a_host_tier(tmp_path: Path) -> None:
    """Updates on the host agree to rounding."""
    case = Case(make=one(torch.optim.AdamW), step=with_closure, planned=True)
    expected = unmanaged(case, tmp_path)
    budget = int(0.45 * expected.status.device_peak_bytes)
    options = {"memory_budget": budget, "host_budget": 64 * MIB, "profile_iterations": 2}
    found = train(case, tmp_path, options)
    assert found.status.phase == "planned" and 0 < found.status.device_peak_bytes <= budget
    for ours, theirs in zip(found.values, expected.values, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def hooked(module: nn.Module) -> list[Optimizer]:
    optimizer = torch.optim.AdamW(module.parameters())
    optimizer.register_step_pre_hook(lambda optimizer, *_: optimizer.zero_grad())
    return [optimizer]


def test_an_optimizer_that_runs_whole(tmp_path: Path) -> None:
    """Its hook runs before the closure, and its states move, too."""
    check(Case(make=hooked, step=with_closure, steps=5), tmp_path, states=6)


def lbfgs(module: nn.Module) -> list[Optimizer]:
    return [torch.optim.LBFGS(module.parameters(), max_iter=2, history_size=2)]


def test_an_optimizer_that_calls_it_several_times(tmp_path: Path) -> None:
    """It gets the closure itself, and runs as without teraio."""
    case = Case(make=lbfgs, step=lambda run, x, index: run.optimizers[0].step(closure_of(run, x)), steps=3)
    expected = unmanaged(case, tmp_path)
    found = train(case, tmp_path, {"memory_budget": expected.status.device_peak_bytes * 4, "storage": str(tmp_path)})
    assert len(found.gradients) > 3 and all(map(torch.equal, found.values, expected.values))
