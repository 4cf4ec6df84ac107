"""Updates on the host's processor, beside the unmanaged optimizer: the same to rounding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import planner
from runtime.paging import State
from teraio.optimizer.host import HostUpdate

from ...thoroughness import by_profile
from ...training import known_blocks
from .optimizers import KINDS, MIB, Case, Result, Run, budgeted, one, plain, reference, train, unmanaged

STEPS = by_profile(ci=16, long=50)
HOST_BYTES = 96 * MIB
TOLERANCE = 1e-3
"""Relative, in the norm of a tensor: what up to 50 steps make of the different rounding of fused and unfused updates, in float32.

Far below one update that is lost or done twice. No bound for single elements: where a gradient is about zero, optimizers
such as Adagrad take whole steps in the direction of its rounding.
"""
FEW_STATES = {"ASGD", "Adagrad", "SGD", "SGD momentum", "SGD nesterov"}
ELEMENTWISE = sorted(KINDS.keys() - {"Adafactor", "Muon"})
TRIED = by_profile(ci=["AdamW", "NAdam", "SGD momentum"], long=ELEMENTWISE)
"""All go through the same code, with their own function of PyTorch and their own kinds of states."""


def plan_for(case: Case, folder: Path, budget: int, *, policy: str = "host-updates", host: int = HOST_BYTES) -> Path:
    """A plan that was made from the trace of a run on demand, in a file."""
    trace, path = folder / "trace.json", folder / f"{policy}.json"
    options = {"memory_budget": budget, "host_budget": host, "trace_out": trace, "profile_iterations": 1}
    train(replace(case, steps=5), folder, options)
    budgets = planner.Budgets(device_bytes=budget, host_bytes=host)
    planner.plan(planner.Trace.load(trace), budgets, policy=policy, time_limit_seconds=5).save(path)
    return path


def on_host(
    case: Case, folder: Path, *, policy: str = "host-updates", fraction: float = 0.6, **options: Any
) -> tuple[Result, Result]:
    """The unmanaged run, and one within a fraction of its peak whose plan updates on the host."""
    expected = reference(case, folder)
    budget = int(fraction * expected.status.device_peak_bytes)
    plan = plan_for(case, folder, budget, policy=policy)
    given = {"memory_budget": budget, "host_budget": HOST_BYTES, "profile_iterations": 1, "plan": plan, **options}
    updates.clear()
    found = train(case, folder, given)
    assert found.status.phase == "planned" and 0 < found.status.device_peak_bytes <= budget
    return expected, found


updates: list[int] = []
"""How many parameters each update on the host was for, since it was cleared last."""


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    run = HostUpdate.run

    def counting(self: HostUpdate, *args: Any) -> float | None:
        seconds = run(self, *args)
        if seconds is not None:
            updates.append(len(self.members))
        return seconds

    monkeypatch.setattr(HostUpdate, "run", counting)


def check_close(found: Result, expected: Result) -> None:
    assert len(found.values) == len(expected.values)
    for number, pair in enumerate(zip(found.values, expected.values, strict=True)):
        assert far(*pair) <= TOLERANCE, f"value {number}"


def far(one_: Tensor, other: Tensor) -> float:
    difference, size = float((one_ - other).norm()), float(other.norm())
    return difference / size if size > 1e-6 else difference


@pytest.mark.parametrize("kind", TRIED)
def test_all_optimizers(kind: str, tmp_path: Path) -> None:
    few = kind in FEW_STATES
    expected, found = on_host(
        Case(make=one(KINDS[kind]), steps=STEPS, layers=4 if few else 2), tmp_path, fraction=0.8 if few else 0.6
    )
    check_close(found, expected)
    assert len(updates) > STEPS, "more than one in each planned step"
    assert found.status.deviations == 0


def test_double_precision(tmp_path: Path) -> None:
    def make(parameters: list[Any]) -> torch.optim.Optimizer:
        for parameter in parameters:
            parameter.data = parameter.data.double()
        return torch.optim.AdamW(parameters, lr=1e-2)

    def step(run: Run, x: Tensor, index: int) -> None:
        plain(run, x.double(), index)

    expected, found = on_host(Case(make=one(make), step=step, steps=12, layers=3), tmp_path)
    assert updates
    for mine, theirs in zip(found.values, expected.values, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("policy", ["stride-2", "ilp"])
def test_some_here_some_there(policy: str, tmp_path: Path) -> None:
    expected, found = on_host(Case(make=one(torch.optim.AdamW), steps=16, layers=4), tmp_path, policy=policy)
    check_close(found, expected)
    assert updates or policy == "ilp"


def test_groups_clipping_and_a_schedule(tmp_path: Path) -> None:
    def make(module: Any) -> list[torch.optim.Optimizer]:
        parameters = list(module.parameters())
        groups = [{"params": parameters[:3], "lr": 1e-2}, {"params": parameters[3:], "weight_decay": 0.2}]
        return [torch.optim.AdamW(groups, lr=1e-3)]

    def step(run: Run, x: Tensor, index: int) -> None:
        schedule = run.kept.setdefault("schedule", torch.optim.lr_scheduler.StepLR(run.optimizers[0], 3))
        run.backward(x)
        run.values.append(torch.nn.utils.clip_grad_norm_(run.module.parameters(), 0.1))
        run.optimizers[0].step()
        schedule.step()
        run.optimizers[0].zero_grad()

    expected, found = on_host(Case(make=make, step=step, steps=16), tmp_path, debug=True, checksums=True)
    check_close(found, expected)
    assert updates


def test_accumulated_gradients_stay_where_they_are(tmp_path: Path) -> None:
    away = []

    def step(run: Run, x: Tensor, index: int) -> None:
        run.backward(x, 0.5)
        run.backward(x.flip(1), 0.5)
        away.append(gradients_away(run))
        run.optimizers[0].step()
        run.optimizers[0].zero_grad()

    expected, found = on_host(Case(make=one(torch.optim.AdamW), step=step, steps=12), tmp_path)
    check_close(found, expected)
    assert updates and away[-1] > 0, "added to in the host tier"


def gradients_away(run: Run) -> int:
    blocks = known_blocks(p.grad for p in run.module.parameters() if p.grad is not None)
    return sum(block.state is State.OFFLOADED for block in blocks)


@pytest.mark.parametrize("direction", ["managed to plain", "plain to managed"])
def test_checkpoints(direction: str, tmp_path: Path) -> None:
    """Saved half-way from where the states wait, and loaded by the other side."""
    file = tmp_path / "checkpoint.pt"

    def saving(run: Run, x: Tensor, index: int) -> None:
        plain(run, x, index)
        if index == 11:
            torch.save({"model": run.module.state_dict(), "optimizer": run.optimizers[0].state_dict()}, file)

    def loading(run: Run, x: Tensor, index: int) -> None:
        if index == 0:
            saved = torch.load(file)
            run.module.load_state_dict(saved["model"])
            run.optimizers[0].load_state_dict(saved["optimizer"])
        plain(run, x, index)

    first, second = (Case(make=one(torch.optim.AdamW), step=each, steps=12) for each in (saving, loading))
    if direction == "managed to plain":
        unmanaged(first, tmp_path)
        saved = torch.load(file)
        _, found = on_host(first, tmp_path)
        mine = torch.load(file)
        pairs = zip(tree_leaves(mine), tree_leaves(saved), strict=True)
        assert all(far(a, b) <= TOLERANCE for a, b in pairs if isinstance(a, Tensor))
        unmanaged(second, tmp_path)
    else:
        unmanaged(first, tmp_path)
        expected, found = on_host(second, tmp_path)
        check_close(found, expected)
    assert updates


@pytest.mark.parametrize("why", ["the option", "deterministic algorithms"])
def test_switched_off(why: str, tmp_path: Path) -> None:
    case = Case(make=one(torch.optim.AdamW), steps=8, planned=True)
    expected = unmanaged(case, tmp_path)
    budget = int(0.6 * expected.status.device_peak_bytes)
    trace = tmp_path / "trace.json"
    options = {**budgeted(case, tmp_path, budget), "host_budget": HOST_BYTES, "trace_out": trace}
    torch.use_deterministic_algorithms(why != "the option")
    try:
        found = train(case, tmp_path, options | {"host_updates": why != "the option"})
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(subgroup.host_seconds is None for subgroup in planner.Trace.load(trace).subgroups)
    assert all(torch.equal(a, b) for a, b in zip(found.values, expected.values, strict=True))
