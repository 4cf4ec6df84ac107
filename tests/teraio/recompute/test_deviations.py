"""What happens between a forward pass that has dropped activations and its backward pass: errors, other runs, other hooks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
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

from ...training import Training, begin, blocks, unequal
from .test_reruns import PLAIN, Model, batch, loss_of, one_pass
from .training import MIB, Profiled, lower, momentum, plan_with_reruns, profiled, program

BUDGET = 22 * MIB
"""So much that little has to move."""


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Profiled]]:
    """The profile, once it has been made."""
    yield []


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A training that follows a plan in which all groups run again. losses: of its steps."""

    training: Training

    def forward(self, number: int, around: Callable[[Training, Tensor], Tensor] = loss_of) -> Tensor:
        """Run a forward pass, which drops activations."""
        self.training.optimizers[0].zero_grad()
        return around(self.training, batch(number))

    def gradients(self) -> list[Tensor]:
        return [p.grad.clone() for p in self.training.module.parameters() if p.grad is not None]

    def expected(self, number: int) -> list[Tensor]:
        """The gradients of a twin that keeps everything. The runs end with this call."""
        state = {name: value.detach().clone() for name, value in self.training.module.state_dict().items()}
        twin = begin(Model, momentum, {})
        twin.module.load_state_dict(state)
        loss_of(twin, batch(number)).backward()
        return [p.grad.clone() for p in twin.module.parameters() if p.grad is not None]


Start = Callable[..., Started]


@pytest.fixture
def start(tmp_path: Path, known: list[Profiled]) -> Start:
    def started(**options: Any) -> Started:
        if not known:
            known.append(profiled(PLAIN, tmp_path))
        draw = random.Random(0)
        chosen = RerunPlaces(known[0].trace).of(range(len(known[0].trace.recompute)))
        plan = plan_with_reruns(known[0], Budgets(device_bytes=BUDGET), chosen, draw)
        path = tmp_path / "plan.json"
        plan.save(path)
        training = begin(Model, momentum, {"memory_budget": BUDGET, "plan": path, **lower("storage", tmp_path), **options})

        def step(number: int, index: int) -> None:
            training.optimizers[0].zero_grad()
            one_pass(training, number, [])
            training.optimizers[0].step()

        training.run(range(8 if options else 5), step)
        (status,) = teraio.status()
        assert status.phase == "planned" and status.recomputed_stages > 0
        return Started(training=training)

    return started


def dropped() -> int:
    return sum(block.state is State.DROPPED for block in blocks())


def test_a_run_that_ends_makes_anew_what_is_still_needed(start: Start) -> None:
    run = start()
    loss = run.forward(7)
    assert dropped() == 3
    teraio.reset()
    loss.backward()
    found = run.gradients()
    assert not unequal(found, run.expected(7))


def test_a_run_that_ends_goes_on_where_an_input_was_changed(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    run = start()
    loss = run.forward(7)
    with torch.no_grad():
        run.training.module.get_submodule("layers.0").up.bias.add_(1)  # type: ignore[union-attr,operator]
    teraio.reset()
    assert "a backward pass that is due will fail" in caplog.text
    with pytest.raises(RuntimeError, match="is not in memory: teraio has dropped it"):
        loss.backward()


def test_a_parameter_that_was_changed_is_an_error_with_its_name(start: Start) -> None:
    """Autograd itself does not notice the change of a bias."""
    run = start()
    loss = run.forward(7)
    with torch.no_grad():
        run.training.module.get_submodule("layers.0").up.bias.add_(1)  # type: ignore[union-attr,operator]
    with pytest.raises(UnsupportedError, match="layers.0.up.bias was changed in place after the forward pass"):
        loss.backward()
    loss = run.forward(8)
    loss.backward()
    found = run.gradients()
    assert not unequal(found, run.expected(8)), "training goes on"


def test_hooks_that_copy_what_is_saved(start: Start) -> None:
    def copying(training: Training, indices: Tensor) -> Tensor:
        with save_on_cpu():
            return loss_of(training, indices)

    run = start()
    loss = run.forward(7, copying)
    assert dropped() == 0
    loss.backward()
    found = run.gradients()
    assert not unequal(found, run.expected(7))


def test_backward_passes_in_another_order(start: Start) -> None:
    """The second forward pass is not in the plan; what the first one dropped is recomputed when it is needed."""
    run = start()
    first, second = run.forward(7), loss_of(run.training, batch(8))
    first.backward()
    found = run.gradients()
    run.training.optimizers[0].zero_grad()
    second.backward()
    found += run.gradients()
    assert not unequal(found, [*run.expected(7), *run.expected(8)])


@pytest.mark.parametrize("error", [StorageIOError(path="/nowhere", block="w", errno=5), BudgetError])
def test_a_stage_that_cannot_run_again_now(start: Start, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    if error is BudgetError:
        error = BudgetError(smallest_bytes=2, budget_bytes=1, stage="again")
    run = start()
    loss = run.forward(7)
    count = [0]
    original = Reruns._run

    def failing(self: Reruns, *arguments: Any) -> None:
        count[0] += 1
        if count[0] == 2:
            raise error
        original(self, *arguments)

    monkeypatch.setattr(Reruns, "_run", failing)
    with pytest.raises(type(error)):
        loss.backward(retain_graph=True)
    assert dropped() == 2
    run.training.optimizers[0].zero_grad()
    loss.backward()
    found = run.gradients()
    assert not unequal(found, run.expected(7))


@pytest.mark.parametrize("options", [{"recompute": "off"}, {"overlap_step": True}])
def test_a_plan_that_this_run_cannot_carry_out_is_refused(start: Start, options: dict[str, Any]) -> None:
    message = "cannot run again in this run: the option (recompute is 'off'|overlap_step)"
    with pytest.raises(PlanError, match=message):
        start(**options)


def test_without_it_the_trace_says_why(tmp_path: Path) -> None:
    trace = profiled(program(Model, one_pass, {"recompute": "off"}), tmp_path).trace
    assert not trace.recompute and {entry.reason for entry in trace.not_recomputed} == {"the option recompute is 'off'"}
