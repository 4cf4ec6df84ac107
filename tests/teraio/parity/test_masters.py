"""A model in half precision, trained over masters behind the backend: the same bits as the textbook loop over fp32 clones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import teraio
from teraio.optimizer import HostRates

from ...thoroughness import by_profile
from ..virtual import for_each_iteration
from .harness import MIB, Case, Result, Run, budgeted_options, check_exact, one_update, train
from .optimizers import KINDS, Layers, small

pytestmark = pytest.mark.usefixtures("fine_and_quick", "few_slices")

BF16, FP16 = torch.bfloat16, torch.float16


def case(
    kind: str, dtype: torch.dtype, steps: int, *, how: str, model: Callable[[int], nn.Module] = Layers, planned: bool = False
) -> Case:
    """how: "clones" trains by the textbook loop, "masters" by teraio's."""

    def make_batches(count: int) -> list[Tensor]:
        return [x.to(dtype) for x in small(kind).make_batches(count)]

    def make(module: nn.Module) -> Optimizer:
        parameters = list(module.to(dtype).parameters())
        optimizer = KINDS[kind]([p.detach().float() for p in parameters] if how == "clones" else parameters)  # type: ignore[misc]
        if how == "masters":
            teraio.manage_optimizer(optimizer, master_weights=True)
        return optimizer

    step = partial(textbook if how == "clones" else ours, steps=steps)
    return small(make, step=step, steps=steps, make_batches=make_batches, model=model, planned=planned)


def textbook(run: Run, x: Tensor, index: int, *, steps: int) -> None:
    run.backward(x)
    masters = run.optimizer.param_groups[0]["params"]
    with torch.no_grad():
        for parameter, master in zip(run.module.parameters(), masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        run.optimizer.step()
        for parameter, master in zip(run.module.parameters(), masters, strict=True):
            parameter.copy_(master)
    run.module.zero_grad()
    if index == steps - 1:
        for number, master in enumerate(masters):
            if master.grad is not None:
                record(run, number, {**run.optimizer.state[master], "master_param": master})


def ours(run: Run, x: Tensor, index: int, *, steps: int) -> None:
    one_update(run, x, index)
    if index == steps - 1:
        for number, parameter in enumerate(run.module.parameters()):
            if parameter in run.optimizer.state:
                record(run, number, run.optimizer.state[parameter])


def record(run: Run, number: int, state: dict[str, Tensor]) -> None:
    for name, value in sorted(state.items()):
        run.record(f"{name} of {number}, {value.dtype}", value)


def check(found: Result, expected: Result) -> None:
    """Losses, masters, states and parameters."""
    check_exact(replace(found, states={}), replace(expected, states={}))
    assert any("master_param" in name for name, _ in found.observed)


def masters_away(result: Result) -> int:
    return sum(name.endswith(".master_param") for name in result.moved_states)


@pytest.mark.parametrize(
    ("kind", "dtype", "steps", "fraction"),
    [("AdamW", FP16, by_profile(ci=8, long=50), 0.5), ("SGD momentum", BF16, 8, 0.6), ("Adafactor", BF16, 8, 0.7)],
)
def test_with_and_without_a_budget(kind: str, dtype: torch.dtype, steps: int, fraction: float, tmp_path: Path) -> None:
    """Without one everything fits after a few steps, and teraio manages nothing any more."""
    expected = train(case(kind, dtype, steps, how="clones"), backend=None)
    masters = case(kind, dtype, steps, how="masters")
    free = train(masters, options={"profile_iterations": 2})
    assert free.status.phase == "fits"
    check(free, expected)
    budget = int(fraction * free.status.device_peak_bytes)
    found = train(masters, options=budgeted_options(masters, tmp_path, budget=budget))
    check(found, expected)
    assert 0 < found.status.device_peak_bytes <= budget and masters_away(found)


def test_by_a_plan(tmp_path: Path) -> None:
    """With the option optimizer off, which does not hold for optimizers that are given by hand."""
    masters = case("AdamW", BF16, 14, how="masters", planned=True)
    found = train(masters, options={**budgeted_options(masters, tmp_path, budget=11 * MIB), "optimizer": "off", "debug": True})
    check(found, train(case("AdamW", BF16, 14, how="clones"), backend=None))
    assert found.status.phase == "planned" and found.status.deviations <= 1
    assert masters_away(found) >= 2 and found.status.device_peak_bytes <= 11 * MIB


def test_subgroups_that_update_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that has it for free there; on the CPU fused AdamW is the same code on both sides."""
    wide = partial(Layers, hidden=8192)  # so that parameters in half precision are blocks
    monkeypatch.setattr(HostRates, "seconds", lambda self, optimizer, dtype, elements: 1e-9)
    on_host: list[int] = []
    for_each_iteration(monkeypatch, lambda iteration: on_host.append(sum(stage.on_host for stage in iteration.stages)))
    options = {"memory_budget": 16 * MIB, "host_budget": 64 * MIB, "profile_iterations": 2, "solver_time_limit": 2}
    found = train(case("AdamW fused", BF16, 16, how="masters", model=wide, planned=True), options=options)
    assert found.status.phase == "planned" and found.status.device_peak_bytes <= 16 * MIB
    assert sum(on_host), "nothing has been updated there"
    check(found, train(case("AdamW fused", BF16, 16, how="clones", model=wide), backend=None))
