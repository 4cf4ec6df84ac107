"""Updates on the host's processor, beside the unmanaged optimizer: the same to rounding. Also those that fail or come late."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import planner
from planner.errors import StorageError
from runtime.paging import Pager, State
from teraio.optimizer import OptimizerFacts, subgroup_steps
from teraio.optimizer.facts import OwnedParameter
from teraio.optimizer.host import HostUpdate

from ...thoroughness import by_profile
from ...training import known_blocks
from ..virtual import for_each_iteration
from .harness import MIB, Case, Result, Run, check_exact, one_update, reference, share_of_peak, train
from .optimizers import KINDS, small

STEPS = by_profile(ci=10, long=50)
HOST_BYTES = 96 * MIB
TOLERANCE = 1e-3
"""Relative, in the norm of a tensor: what up to 50 steps make of the different rounding of fused and unfused updates, in float32.

Far below one update that is lost or done twice. No bound for single elements: where a gradient is about zero, optimizers
such as Adagrad take whole steps in the direction of its rounding.
"""
FEW_STATES = {"ASGD", "Adagrad", "SGD", "SGD momentum", "SGD nesterov"}
TRIED = by_profile(ci=["NAdam", "SGD momentum"], long=sorted(KINDS.keys() - {"Adafactor", "Muon"}))
"""All go through the same code, with their own function of PyTorch and their own kinds of states."""


def plan_for(case: Case, folder: Path, budget: int, *, policy: str = "host-updates") -> Path:
    """A plan that was made from the trace of a run on demand, in a file."""
    path = folder / f"{policy}.json"
    _plan_for(replace(case, steps=5), budget, policy).save(path)
    return path


@functools.cache
def _plan_for(case: Case, budget: int, policy: str) -> planner.Plan:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        options = {"memory_budget": budget, "host_budget": HOST_BYTES, "trace_out": trace, "profile_iterations": 1}
        train(case, options=options)
        budgets = planner.Budgets(device_bytes=budget, host_bytes=HOST_BYTES)
        return planner.plan(planner.Trace.load(trace), budgets, policy=policy, time_limit_seconds=5)


def on_host(
    case: Case, folder: Path, *, policy: str = "host-updates", fraction: float = 0.6, as_usual: bool = True, **options: Any
) -> tuple[Result, Result]:
    """The unmanaged run, and one within a fraction of its peak whose plan updates on the host.

    as_usual: a plan for `one_update` is one for the case's step.
    """
    expected = reference(case)
    budget = int(fraction * expected.status.device_peak_bytes)
    plan = plan_for(replace(case, step=one_update) if as_usual else case, folder, budget, policy=policy)
    given = {"memory_budget": budget, "host_budget": HOST_BYTES, "profile_iterations": 1, "plan": plan, **options}
    updates.clear()
    found = train(case, options=given)
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


def check_near(found: Result, expected: Result, tolerance: float = TOLERANCE) -> None:
    ours, theirs = found.named(), expected.named()
    assert ours.keys() == theirs.keys()
    assert not [name for name, value in ours.items() if far(value, theirs[name]) > tolerance]


def far(one_: Tensor, other: Tensor) -> float:
    difference, size = float((one_ - other).norm()), float(other.norm())
    return difference / size if size > 1e-6 else difference


@pytest.mark.parametrize("kind", TRIED)
def test_all_optimizers(kind: str, tmp_path: Path) -> None:
    few = kind in FEW_STATES
    expected, found = on_host(small(kind, steps=STEPS, layers=4 if few else 2), tmp_path, fraction=0.8 if few else 0.6)
    check_near(found, expected)
    assert len(updates) > STEPS, "more than one in each planned step"
    assert found.status.deviations == 0


def test_groups_clipping_a_schedule_and_accumulated_gradients(tmp_path: Path) -> None:
    """Gradients are added to in the host tier."""
    away = []

    def make(module: Any) -> Optimizer:
        parameters = list(module.parameters())
        groups = [{"params": parameters[:3], "lr": 1e-2}, {"params": parameters[3:], "weight_decay": 0.2}]
        return torch.optim.AdamW(groups, lr=1e-3)

    def step(run: Run, x: Tensor, index: int) -> None:
        schedule = run.kept.setdefault("schedule", torch.optim.lr_scheduler.StepLR(run.optimizer, 3))
        run.backward(x, 0.5)
        run.backward(x.flip(1), 0.5)
        gradients = known_blocks(p.grad for p in run.module.parameters() if p.grad is not None)
        away.append(sum(block.state is State.OFFLOADED for block in gradients))
        if index % 2:
            run.record("norm", torch.nn.utils.clip_grad_norm_(run.module.parameters(), 0.1))
        run.update()
        schedule.step()

    case = small(make, step=step, steps=STEPS)
    expected, found = on_host(case, tmp_path, as_usual=False, debug=True, checksums=True)
    check_near(found, expected)
    assert updates and away[-1] > 0


def test_switched_off(tmp_path: Path) -> None:
    """By the option. By deterministic algorithms: `../optimizer/test_host.py`."""
    case = small("AdamW", steps=8, planned=True)
    trace = tmp_path / "trace.json"
    options = {**share_of_peak(case, tmp_path, 0.6), "host_budget": HOST_BYTES, "trace_out": trace}
    found = train(case, options=options | {"host_updates": False})
    assert all(subgroup.host_seconds is None for subgroup in planner.Trace.load(trace).subgroups)
    check_exact(found, reference(case))


# -- updates that fail, come late or do not come to pass


def test_an_error_of_the_update_reaches_the_training_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, *_: object) -> None:
        raise StorageError("no such luck")

    monkeypatch.setattr(HostUpdate, "update", fail)
    with pytest.raises(StorageError, match="no such luck"):
        on_host(small("AdamW", steps=4), tmp_path)


def test_a_step_that_fails_leaves_no_update_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have not begun never do; and the next steps go on, on the host."""
    run, submit, acquire = HostUpdate.run, ThreadPoolExecutor.submit, Pager.acquire
    running: set[int] = set()
    begun: list[int] = []
    left: list[tuple[int, int]] = []
    steps = [0]

    def beginning(*args: Any) -> Any:
        begun.append(steps[0])
        return submit(*args)

    def slow(self: HostUpdate, *args: Any) -> float | None:
        running.add(id(self))
        time.sleep(0.01)
        try:
            return run(self, *args)
        finally:
            running.discard(id(self))

    def failing(self: Pager, blocks: Any, new_bytes: int, what: str, **others: Any) -> None:
        if what == "optimizer/subgroup.1" and begun.count(steps[0]) > 1 and not left:
            raise KeyboardInterrupt
        acquire(self, blocks, new_bytes, what, **others)

    def step(run: Run, x: Tensor, index: int) -> None:
        steps[0] = index
        run.backward(x)
        try:
            run.optimizer.step()
        except KeyboardInterrupt:
            left.append((len(running), len(updates)))
            time.sleep(0.1)
            left.append((len(running), len(updates)))
        run.optimizer.zero_grad()

    usual = small("AdamW", layers=4, steps=7)
    budget = int(0.6 * reference(usual).status.device_peak_bytes)
    plan = plan_for(usual, tmp_path, budget, policy="stride-2")
    monkeypatch.setattr(HostUpdate, "run", slow)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", beginning)
    monkeypatch.setattr(Pager, "acquire", failing)
    updates.clear()
    case = replace(usual, step=step)
    train(case, options={"memory_budget": budget, "host_budget": HOST_BYTES, "profile_iterations": 1, "plan": plan})
    assert left, "a step has failed"
    assert left[0] == left[1] and left[0][0] == 0
    assert len(updates) > left[1][1]


def test_blocks_that_do_not_get_there_update_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if that turns out late; and not only once."""
    case = small("AdamW", steps=6)
    run_step = subgroup_steps.run_step
    refused, seconds = [], []

    def refuse(self: Any, blocks: Any) -> None:
        refused.append(len(blocks))

    def slow(facts: OptimizerFacts, parameters: Sequence[OwnedParameter]) -> None:
        run_step(facts, parameters)
        if any(owned.tensor.numel() for owned in parameters):
            time.sleep(0.005)

    monkeypatch.setattr("runtime.paging.stage_memory.Lending.lend_memory", refuse)
    monkeypatch.setattr(subgroup_steps, "run_step", slow)
    for_each_iteration(monkeypatch, lambda i: seconds.append([stage.seconds for stage in i.stages if stage.elements]))
    expected, found = on_host(case, tmp_path)
    assert refused and not updates
    assert min(seconds[-1]) > 0.005, "what the device did in the end is measured as ever"
    check_exact(found, expected)
