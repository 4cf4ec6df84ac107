"""Every optimizer under a budget that its states do not fit in: the same bits as the unmanaged optimizer over the same stages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.testing._internal.two_tensor import TwoTensor

import teraio

from ...thoroughness import by_profile, every_other
from .optimizers import KEEPS_NONE, KINDS, MIB, Case, Run, budgeted, check, one, train, unmanaged

pytestmark = pytest.mark.usefixtures("fine_and_quick")


TOGETHER = 6
"""Optimizers in one training, one for each layer: compiling takes longer than training."""


def in_turns(run: Run, x: Tensor, index: int) -> None:
    """Another optimizer steps last each time: what was used last stays on the device."""
    run.backward(x)
    first = index % len(run.optimizers)
    for optimizer in run.optimizers[first:] + run.optimizers[:first]:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("first", range(0, len(KINDS), TOGETHER))
def test_every_optimizer(first: int, tmp_path: Path) -> None:
    kinds = list(KINDS)[first : first + TOGETHER]

    def make(module: nn.Module) -> list[Optimizer]:
        layers = [[*up.parameters(), *down.parameters()] for up, down in zip(module.up, module.down, strict=True)]  # type: ignore[arg-type, union-attr]
        layers[0].append(module.unused)  # type: ignore[arg-type]
        return [KINDS[kind](layer) for kind, layer in zip(kinds, layers, strict=True)]

    case = Case(make=make, step=in_turns, steps=by_profile(ci=16, long=50), layers=len(kinds))
    result = check(case, tmp_path, states=len(kinds), fraction=0.33)
    for layer, kind in enumerate(kinds):
        assert kind in KEEPS_NONE or any(f".{layer}." in name for name in result.moved_states), result.moved_states


@pytest.mark.parametrize("kind", every_other("AdamW", "SGD momentum"))
def test_by_a_plan(kind: str, tmp_path: Path) -> None:
    check(Case(make=one(KINDS[kind]), planned=True, steps=8), tmp_path, states=3, debug=True)


def test_states_in_the_host_tier(tmp_path: Path) -> None:
    case = Case(make=one(torch.optim.AdamW), planned=True, steps=8)
    result = check(case, tmp_path, states=6, host_budget=6 * MIB, host_updates=False, checksums=True)
    assert min(result.status.moved_bytes[f"device->{tier}"] for tier in ("host", "storage")) > 0


class Doubled(Optimizer):
    """Momentum as a tensor without memory of its own, over two that have it, as in optimizers of 8 bits."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                both = self.state[parameter].setdefault("momentum", TwoTensor(*(torch.zeros_like(parameter) for _ in range(2))))
                for each in (both.a, both.b):
                    each.mul_(0.9).add_(parameter.grad)
                parameter.sub_(both.a, alpha=0.01)


def test_states_over_several_tensors(tmp_path: Path) -> None:
    found = check(Case(make=one(Doubled), planned=True, steps=8), tmp_path, states=4)
    assert {name.rsplit(".", 1)[-1] for name in found.moved_states} >= {"1"}, "the second one is a block of its own"


def test_thirty_percent_of_the_peak(tmp_path: Path) -> None:
    case = Case(make=one(torch.optim.AdamW), layers=6, planned=True, steps=8)
    result = check(case, tmp_path, states=20, fraction=0.3)
    assert result.status.deviations <= 1


def test_the_smallest_budgets_that_the_errors_name(tmp_path: Path) -> None:
    """Each is larger than the one before, and the last one works. The first counts the update of the largest parameter."""
    case = Case(make=one(torch.optim.AdamW), steps=3)
    expected = unmanaged(case, tmp_path)
    budgets, stages = [MIB], []
    while True:
        try:
            found = train(case, tmp_path, budgeted(case, tmp_path, budgets[-1]))
        except teraio.BudgetError as error:
            assert error.smallest_bytes > budgets[-1]
            budgets.append(error.smallest_bytes)
            stages.append(error.stage)
        else:
            break
    assert len(stages) == 1, stages
    assert budgets[-1] < 6.5 * MIB, "a parameter, its gradient, two states, two temporaries, and what is small"
    assert found.status.device_peak_bytes <= budgets[-1] and all(map(torch.equal, found.values, expected.values))
