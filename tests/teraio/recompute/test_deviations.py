"""What happens between a forward pass that has dropped activations and its backward pass: errors, other runs, other hooks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

import teraio
from planner import Budgets
from planner.errors import BudgetError, PlanError, StorageIOError, UnsupportedError
from planner.problem import RerunPlaces
from runtime.execution import Reruns
from runtime.paging import State

from ...training import MIB, blocks, unequal
from ..parity.harness import Run, start
from .programs import PLAIN, Profiled, batch, loss_of, lower, plan_with_reruns, profiled, program

pytestmark = pytest.mark.usefixtures("same_program_at_every_budget", "deterministic")

BUDGET = 22 * MIB
"""So much that little has to move."""
STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The profile, and what gradients a run that keeps everything has after `STEPS` steps, by the number of the batch."""

    profiled: Profiled
    gradients: dict[int, list[Tensor]]


@pytest.fixture(scope="module")
def known_once() -> list[Known]:
    return []


@pytest.fixture
def known(tmp_path: Path, known_once: list[Known]) -> Known:
    if not known_once:
        found = profiled(PLAIN, tmp_path)
        run = start(PLAIN)
        run.go(list(range(STEPS)))
        known_once.append(Known(profiled=found, gradients={number: gradients(run, forward(run, number)) for number in (7, 8)}))
    return known_once[0]


def planned(known: Known, folder: Path, **options: Any) -> Run:
    """Train by a plan in which all groups run again."""
    trace, path = known.profiled.trace, folder / "plan.json"
    chosen = RerunPlaces(trace).of(range(len(trace.recompute)))
    plan_with_reruns(known.profiled, Budgets(device_bytes=BUDGET), chosen, random.Random(0)).save(path)
    run = start(PLAIN, options={"memory_budget": BUDGET, "plan": path, **lower("storage", folder), **options})
    run.go(list(range(8 if options else STEPS)))
    (status,) = teraio.status()
    assert status.phase == "planned" and status.recomputed_stages > 0
    run.optimizer.param_groups[0]["lr"] = 0.0  # later steps end iterations and change no parameter
    return run


def forward(run: Run, number: int) -> Tensor:
    """Run a forward pass, which drops activations."""
    run.optimizer.zero_grad()
    return loss_of(run, batch(number))


def gradients(run: Run, loss: Tensor) -> list[Tensor]:
    loss.backward()
    return [p.grad.clone() for p in run.module.parameters() if p.grad is not None]


def end_iteration(run: Run) -> None:
    """And take one as it is planned, so that the next one follows the plan again."""
    run.optimizer.step()
    gradients(run, forward(run, 7))
    run.optimizer.step()


def dropped() -> int:
    return sum(block.state is State.DROPPED for block in blocks())


def change_an_input(run: Run) -> None:
    """Autograd itself does not notice the change of a bias."""
    with torch.no_grad():
        run.module.layers[0].up.bias.add_(1)


def test_a_run_that_ends_recomputes_what_is_still_needed(known: Known, tmp_path: Path) -> None:
    run = planned(known, tmp_path)
    loss = forward(run, 7)
    assert dropped() == 3
    teraio.reset()
    assert not unequal(gradients(run, loss), known.gradients[7])


def test_a_run_that_ends_goes_on_where_an_input_was_changed(
    known: Known, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = planned(known, tmp_path)
    loss = forward(run, 7)
    change_an_input(run)
    teraio.reset()
    assert "a backward pass that is due will fail" in caplog.text
    with pytest.raises(RuntimeError, match="is not in memory: teraio has dropped it"):
        loss.backward()


def test_training_goes_on(known: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After hooks that copy what is saved, passes in another order, stages that fail, and an input that was changed."""
    run = planned(known, tmp_path)
    with save_on_cpu():
        loss = forward(run, 7)
    assert dropped() == 0
    assert not unequal(gradients(run, loss), known.gradients[7])
    end_iteration(run)
    # The second forward pass is not in the plan; what the first one dropped is recomputed when it is needed.
    first, second = forward(run, 7), loss_of(run, batch(8))
    assert not unequal(gradients(run, first), known.gradients[7])
    run.optimizer.zero_grad()
    assert not unequal(gradients(run, second), known.gradients[8])
    end_iteration(run)
    no_room = BudgetError(smallest_bytes=2, budget_bytes=1, stage="again")
    for error in (StorageIOError(path="/nowhere", block="w", errno=5), no_room):
        loss = forward(run, 7)
        with monkeypatch.context() as patch, pytest.raises(type(error)):
            fail_the_second(patch, error)
            loss.backward(retain_graph=True)
        assert dropped() == 2
        run.optimizer.zero_grad()
        assert not unequal(gradients(run, loss), known.gradients[7])
        end_iteration(run)
    before = run.module.layers[0].up.bias.detach().clone()
    loss = forward(run, 7)
    change_an_input(run)
    with pytest.raises(UnsupportedError, match="layers.0.up.bias was changed in place after the forward pass"):
        loss.backward()
    run.module.layers[0].up.bias.data.copy_(before)
    assert not unequal(gradients(run, forward(run, 8)), known.gradients[8])


def fail_the_second(patch: pytest.MonkeyPatch, error: Exception) -> None:
    """The second stage that runs again from now on raises the error."""
    count = [0]
    original = Reruns._run

    def failing(self: Reruns, *arguments: Any) -> None:
        count[0] += 1
        if count[0] == 2:
            raise error
        original(self, *arguments)

    patch.setattr(Reruns, "_run", failing)


@pytest.mark.parametrize("options", [{"recompute": "off"}, {"overlap_step": True}])
def test_a_plan_that_this_run_cannot_carry_out_is_refused(known: Known, tmp_path: Path, options: dict[str, Any]) -> None:
    message = "cannot run again in this run: the option (recompute is 'off'|overlap_step)"
    with pytest.raises(PlanError, match=message):
        planned(known, tmp_path, **options)


def test_without_it_the_trace_says_why(tmp_path: Path) -> None:
    trace = profiled(program(options={"recompute": "off"}), tmp_path).trace
    assert not trace.recompute and {entry.reason for entry in trace.not_recomputed} == {"the option recompute is 'off'"}
