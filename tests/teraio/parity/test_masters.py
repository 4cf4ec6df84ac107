"""A model in half precision, trained over masters behind the backend: the same bits as the textbook loop over fp32 clones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import teraio
from teraio.optimizer import HostRates
from teraio.optimizer.host import HostUpdate

from ...thoroughness import by_profile
from ...training import compiled, forget
from .optimizers import KINDS, MIB, Case, Make, Model, Result, Run, budgeted, train

pytestmark = pytest.mark.usefixtures("fine_and_quick")

BF16, FP16 = torch.bfloat16, torch.float16


def clones(kind: Make, dtype: torch.dtype, module: nn.Module) -> list[Optimizer]:
    return [kind([p.detach().float() for p in module.to(dtype).parameters()])]  # type: ignore[misc]


def textbook(run: Run, x: Tensor, index: int, *, dtype: torch.dtype, steps: int) -> None:
    run.backward(x.to(dtype))
    (optimizer,) = run.optimizers
    masters = optimizer.param_groups[0]["params"]
    with torch.no_grad():
        for parameter, master in zip(run.module.parameters(), masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        optimizer.step()
        for parameter, master in zip(run.module.parameters(), masters, strict=True):
            parameter.copy_(master)
    run.module.zero_grad()
    if index == steps - 1:
        run.values += [m.clone() for m in masters if m.grad is not None]
        run.values += [value.clone() for master in masters for _, value in sorted(optimizer.state[master].items())]


def managed(kind: Make, dtype: torch.dtype, module: nn.Module) -> list[Optimizer]:
    optimizer = kind(list(module.to(dtype).parameters()))  # type: ignore[arg-type]
    teraio.manage_optimizer(optimizer, master_weights=True)
    return [optimizer]


def ours(run: Run, x: Tensor, index: int, *, dtype: torch.dtype, steps: int) -> None:
    run.backward(x.to(dtype))
    (optimizer,) = run.optimizers
    optimizer.step()
    optimizer.zero_grad()
    if index == steps - 1:
        states = [dict(sorted(optimizer.state[p].items())) for p in run.module.parameters() if p in optimizer.state]
        run.values += [state.pop("master_param").clone() for state in states]
        run.values += [value.clone() for state in states for value in state.values()]


def result(
    make: Callable[..., list[Optimizer]],
    step: Callable[..., None],
    folder: Path,
    options: dict[str, Any],
    *,
    kind: str = "AdamW",
    dtype: torch.dtype = BF16,
    steps: int,
    planned: bool = False,
    make_model: Callable[[int], nn.Module] = Model,
) -> Result:
    case = Case(
        make=functools.partial(make, KINDS[kind], dtype),
        step=functools.partial(step, dtype=dtype, steps=steps),
        steps=steps,
        planned=planned,
        make_model=make_model,
    )
    return train(case, folder, options)


def check(found: Result, expected: Result) -> None:
    """Losses, masters, states and parameters; what follows in `found` is the optimizer's state once more."""
    assert len(found.values) >= len(expected.values) > 10
    pairs = list(zip(found.values, expected.values, strict=False))
    unequal = [i for i, (one, other) in enumerate(pairs) if one.dtype != other.dtype or not torch.equal(one, other)]
    assert not unequal, f"{unequal} of {len(pairs)} tensors differ"


@pytest.mark.parametrize(
    ("kind", "dtype", "steps", "fraction"),
    [
        ("AdamW", BF16, by_profile(ci=14, long=50), 0.5),
        ("AdamW", FP16, 14, 0.5),
        ("SGD momentum", FP16, 14, 0.6),
        ("Adafactor", BF16, 14, 0.7),
    ],
)
def test_with_and_without_a_budget(kind: str, dtype: torch.dtype, steps: int, fraction: float, tmp_path: Path) -> None:
    """Without one everything fits after a few steps, and teraio manages nothing any more."""
    run = functools.partial(result, kind=kind, dtype=dtype, steps=steps)
    expected = run(clones, textbook, tmp_path, {"optimizer": "off"})
    free = run(managed, ours, tmp_path, {"profile_iterations": 2})
    assert free.status.phase == "fits"
    check(free, expected)
    budget = int(fraction * free.status.device_peak_bytes)
    found = run(managed, ours, tmp_path, budgeted(Case(make=lambda _: []), tmp_path, budget))
    check(found, expected)
    assert 0 < found.status.device_peak_bytes <= budget
    assert any(name.endswith(".master_param") for name in found.moved_states), found.moved_states


def test_by_a_plan(tmp_path: Path) -> None:
    """With the option optimizer off, which does not hold for optimizers that are given by hand."""
    expected = result(clones, textbook, tmp_path, {"optimizer": "off"}, steps=14)
    case = Case(make=lambda _: [], planned=True)
    options = {**budgeted(case, tmp_path, 11 * MIB), "optimizer": "off", "debug": True}
    found = result(managed, ours, tmp_path, options, steps=14, planned=True)
    check(found, expected)
    assert found.status.phase == "planned" and found.status.deviations <= 1
    assert sum(name.endswith(".master_param") for name in found.moved_states) >= 2
    assert found.status.device_peak_bytes <= 11 * MIB


def turning(run: Run, x: Tensor, index: int, *, dtype: torch.dtype, steps: int) -> None:
    """Without masters for the first half; then with."""
    if index == steps // 2:
        teraio.manage_optimizer(run.optimizers[0], master_weights=True)
    if index < steps // 2:
        run.backward(x.to(dtype))
        run.optimizers[0].step()
        run.optimizers[0].zero_grad()
    else:
        ours(run, x, index, dtype=dtype, steps=steps)


def without(kind: Make, dtype: torch.dtype, module: nn.Module) -> list[Optimizer]:
    return [kind(list(module.to(dtype).parameters()))]  # type: ignore[arg-type]


def test_masters_from_the_middle_of_a_training_on(tmp_path: Path) -> None:
    """States that wait elsewhere are cast as well; the budget holds all the same."""
    expected = result(without, turning, tmp_path, {"optimizer": "off", "profile_iterations": 1000}, steps=12)
    found = result(without, turning, tmp_path, budgeted(Case(make=lambda _: []), tmp_path, 12 * MIB), steps=12)
    check(found, expected)
    assert found.status.device_peak_bytes <= 12 * MIB and len(found.moved_states) >= 2


def resetting(run: Run, x: Tensor, index: int, *, dtype: torch.dtype, steps: int) -> None:
    """`teraio.reset` after some steps; masters go on without teraio's backend."""
    ours(run, x, index, dtype=dtype, steps=steps)
    if index == 4:
        forget()
        run.training.model = compiled(run.module, {})


def test_a_reset_in_the_middle(tmp_path: Path) -> None:
    expected = result(clones, textbook, tmp_path, {"optimizer": "off"}, steps=11)
    found = result(managed, resetting, tmp_path, budgeted(Case(make=lambda _: []), tmp_path, 11 * MIB), steps=11)
    check(found, expected)


def test_subgroups_that_update_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that has it for free there; on the CPU fused AdamW is the same code on both sides."""
    wide = functools.partial(Model, hidden=8192)  # so that parameters in half precision are blocks
    monkeypatch.setattr(HostRates, "seconds", lambda self, optimizer, dtype, elements: 1e-9)
    begun: list[int] = []
    seconds = HostUpdate.seconds

    def noting(update: HostUpdate) -> float | None:
        found = seconds(update)
        begun.extend(update.members if found is not None else ())
        return found

    monkeypatch.setattr(HostUpdate, "seconds", noting)
    expected = result(clones, textbook, tmp_path, {"optimizer": "off"}, kind="AdamW fused", steps=16, make_model=wide)
    options = {"memory_budget": 16 * MIB, "host_budget": 64 * MIB, "profile_iterations": 2, "solver_time_limit": 2}
    found = result(managed, ours, tmp_path, options, kind="AdamW fused", steps=16, planned=True, make_model=wide)
    check(found, expected)
    assert found.status.phase == "planned" and found.status.device_peak_bytes <= 16 * MIB
    assert begun, "nothing has been updated there"


def saving(run: Run, x: Tensor, index: int, *, dtype: torch.dtype, steps: int) -> None:
    ours(run, x, index, dtype=dtype, steps=steps)
    if index == steps // 2 - 1:
        torch.save((run.module.state_dict(), run.optimizers[0].state_dict()), run.folder / "checkpoint.pt")


def resuming(run: Run, x: Tensor, index: int, *, dtype: torch.dtype, steps: int) -> None:
    """Begins where `saving` saved, with new objects."""
    if index == steps // 2:
        model, optimizer = torch.load(run.folder / "checkpoint.pt")
        run.module.load_state_dict(model)
        run.optimizers[0].load_state_dict(optimizer)
    if index >= steps // 2:
        ours(run, x, index, dtype=dtype, steps=steps)


def test_a_checkpoint_on_the_drive(tmp_path: Path) -> None:
    """What is loaded leaves the memory like what has been made."""
    expected = result(clones, textbook, tmp_path, {"optimizer": "off"}, steps=12)
    options = budgeted(Case(make=lambda _: []), tmp_path, 11 * MIB)
    saved = result(managed, saving, tmp_path, options, steps=12)
    check(saved, expected)
    resumed = result(managed, resuming, tmp_path, options, steps=12)
    check(dataclasses.replace(resumed, values=expected.values[:6] + resumed.values), expected)
    assert {name.rpartition(".")[2] for name in resumed.moved_states} == {"master_param", "exp_avg", "exp_avg_sq"}
    assert resumed.status.device_peak_bytes <= 11 * MIB
