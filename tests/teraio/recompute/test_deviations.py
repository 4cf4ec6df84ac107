"""What happens between a forward pass that has dropped activations and its backward pass: errors, other runs, other hooks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

import planner
import teraio
from planner import Budgets, Plan, Trace, plan
from planner.errors import BudgetError, PlanError, StorageIOError, UnsupportedError
from planner.problem import RerunPlaces
from runtime.execution import Reruns
from runtime.paging import State
from runtime.transfer import Engine
from teraio.machine import Machine, Shared
from teraio.registry import REGISTRY

from ...thoroughness import every_other
from ...training import MIB, blocks, unequal
from ..in_process import InstantJob
from ..parity.harness import Run, start, train
from ..virtual import link_rates
from .programs import (
    PLAIN,
    PROGRAMS,
    ROWS,
    Model,
    batch,
    check,
    follow,
    loss_of,
    lower,
    one_pass,
    plan_with_reruns,
    profiled,
    program,
    without_a_budget,
)

pytestmark = pytest.mark.usefixtures("same_program_at_every_budget", "deterministic")

BUDGET = 22 * MIB
"""So much that little has to move."""
STEPS = 5


@functools.cache
def known_gradients() -> dict[int, list[Tensor]]:
    """Those that a training without teraio has after `STEPS` steps, by the number of the batch."""
    run = start(PLAIN, backend=None)
    run.go(list(range(STEPS)))
    return {number: gradients(run, forward(run, number)) for number in (7, 8)}


def planned(folder: Path, **options: Any) -> Run:
    """Train by a plan in which all groups run again."""
    known, path = profiled(PLAIN), folder / "plan.json"
    chosen = RerunPlaces(known.trace).of(range(len(known.trace.recompute)))
    plan_with_reruns(known, Budgets(device_bytes=BUDGET), chosen, random.Random(0)).save(path)
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


def test_a_run_that_ends_recomputes_what_is_still_needed(tmp_path: Path) -> None:
    known = known_gradients()
    run = planned(tmp_path)
    loss = forward(run, 7)
    assert dropped() == 3
    teraio.reset()
    assert not unequal(gradients(run, loss), known[7])


def test_a_run_that_ends_goes_on_where_an_input_was_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = planned(tmp_path)
    loss = forward(run, 7)
    change_an_input(run)
    teraio.reset()
    assert "a backward pass that is due will fail" in caplog.text
    with pytest.raises(RuntimeError, match="is not in memory: teraio has dropped it"):
        loss.backward()


def test_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After hooks that copy what is saved, passes in another order, stages that fail, and an input that was changed."""
    known = known_gradients()
    run = planned(tmp_path)
    with save_on_cpu():
        loss = forward(run, 7)
    assert dropped() == 0
    assert not unequal(gradients(run, loss), known[7])
    end_iteration(run)
    # The second forward pass is not in the plan; what the first one dropped is recomputed when it is needed.
    first, second = forward(run, 7), loss_of(run, batch(8))
    assert not unequal(gradients(run, first), known[7])
    run.optimizer.zero_grad()
    assert not unequal(gradients(run, second), known[8])
    end_iteration(run)
    no_room = BudgetError(smallest_bytes=2, budget_bytes=1, stage="again")
    for error in (StorageIOError(path="/nowhere", block="w", errno=5), no_room):
        loss = forward(run, 7)
        with monkeypatch.context() as patch, pytest.raises(type(error)):
            fail_the_second(patch, error)
            loss.backward(retain_graph=True)
        assert dropped() == 2
        run.optimizer.zero_grad()
        assert not unequal(gradients(run, loss), known[7])
        end_iteration(run)
    before = run.module.layers[0].up.bias.detach().clone()
    loss = forward(run, 7)
    change_an_input(run)
    with pytest.raises(UnsupportedError, match="layers.0.up.bias was changed in place after the forward pass"):
        loss.backward()
    run.module.layers[0].up.bias.data.copy_(before)
    assert not unequal(gradients(run, forward(run, 8)), known[8])


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
def test_a_plan_that_this_run_cannot_carry_out_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    message = "cannot run again in this run: the option (recompute is 'off'|overlap_step)"
    with pytest.raises(PlanError, match=message):
        planned(tmp_path, **options)


# -- plans that nobody would choose, and forward stages that run again, also on demand: the bits of training without a budget


@pytest.mark.parametrize(("tier", "seed", "share"), [("storage", 1, 0.6), ("host", 2, 1.0), ("both", 3, 0.0)])
def test_random_plans(tmp_path: Path, tier: str, seed: int, share: float) -> None:
    known = profiled(PLAIN, tier=tier)
    assert len(known.trace.recompute) >= 3
    follow(PLAIN, known, tmp_path, seed, tier=tier, share=share, debug=seed % 2 == 1)


@pytest.mark.parametrize("name", every_other(*PROGRAMS))
def test_programs_by_random_plans(tmp_path: Path, name: str) -> None:
    known = profiled(PROGRAMS[name])
    follow(PROGRAMS[name], known, tmp_path, seed=3)


def test_dropout_of_eager_stages_is_not_run_again(tmp_path: Path) -> None:
    trace = profiled(program(lambda: Model(drop=0.2))).trace
    reasons = {entry.reason for entry in trace.not_recomputed}
    assert reasons == {"it draws random numbers (native_dropout)"}


def test_dropout_of_inductor(tmp_path: Path) -> None:
    """Its seeds are kept, so that the stages that drop run again too."""
    trained = program(lambda: Model(layers=2, drop=0.2), options={"codegen": "inductor"})
    known = profiled(trained)
    assert len(known.trace.recompute) >= 2
    follow(trained, known, tmp_path, seed=4)


# -- by a planner, where the drive is slow

SLOW = 1e7
"""Bytes per second: an activation takes half a second, and a stage takes milliseconds."""


LARGE = program(passes=partial(one_pass, rows=3 * ROWS), options={"solver_time_limit": 3})


@pytest.mark.parametrize("recompute", ["auto", "off"])
def test_a_slow_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, recompute: str) -> None:
    reference = without_a_budget(LARGE)
    monkeypatch.setattr(Engine, "measure", lambda *_, **__: link_rates(SLOW, SLOW))
    # The policy that recomputes wherever it can: what "ilp" finds depends on how long the machine takes.
    monkeypatch.setattr(planner, "plan", partial(planner.plan, policy="checkpoint"))
    budget = int(0.8 * reference.status.device_peak_bytes)
    options = {"memory_budget": budget, "recompute": recompute, **lower("storage", tmp_path)}
    with caplog.at_level("INFO", logger="teraio"):
        result = train(LARGE, options=options)
    check(result, reference, budget)
    last = result.status
    assert last.phase == "planned"
    assert (last.recomputed_stages > 0) == (recompute == "auto")
    assert (last.recompute_seconds > 0) == (recompute == "auto")
    assert ("stages that run again an iteration" in caplog.text) == (recompute == "auto")


# -- a drive turns out slower than measured: the plan is replaced while it trains, and the bits stay

TRAINED = replace(PLAIN, steps=16)
SLOW_READ = 1e6
"""Bytes per second: a block of 1 MiB takes about a second, and all stages together take less, also on a busy machine."""
BUSY_SECONDS = Machine.busy_seconds


def busy_seconds(machine: Machine) -> dict[str, float]:
    """Of reads at `SLOW_READ`: however busy the processor is, no stage is long enough to hide many of them."""
    read = {link: size / SLOW_READ for link, size in machine.moved_bytes().items() if link == "storage->device"}
    return BUSY_SECONDS(machine) | read


def test_another_plan_takes_over(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """The first plan offloads everything, where the integer program would not."""
    policies = itertools.chain(["zero-infinity"], itertools.repeat("ilp"))

    def start_job(trace: Trace, budgets: Budgets, *, time_limit_seconds: float, known: Plan | None = None) -> InstantJob:
        return InstantJob(trace, plan(trace, budgets, policy=next(policies), time_limit_seconds=time_limit_seconds))

    reference = train(TRAINED, backend=None)
    budget = int(0.75 * without_a_budget(PLAIN).status.device_peak_bytes)
    monkeypatch.setattr(REGISTRY, "parts", dataclasses.replace(REGISTRY.parts, start_job=start_job))
    monkeypatch.setattr(Engine, "measure", lambda engine: link_rates(4e9, 4e9))
    monkeypatch.setattr(REGISTRY, "shared", Shared())
    monkeypatch.setattr(Machine, "busy_seconds", busy_seconds)
    out = {"trace_out": tmp_path / "trace.json", "plan_out": tmp_path / "plan.json"}
    options = {"memory_budget": budget, "storage": tmp_path, "profile_iterations": 1, "recompute": "off", **out}
    with caplog.at_level(logging.INFO, logger="teraio"):
        result = train(TRAINED, options=options)
    check(result, reference, budget)
    progress = [status for (status,) in result.progress]
    phases = [status.phase for status in progress]
    first = phases.index("planned")
    assert set(phases[first:]) == {"planned"}
    assert (progress[first].replans, progress[-1].replans) == (0, 1)
    read = [status.moved_bytes["storage->device"] for status in progress]
    assert read[-1] - read[-2] < read[first + 2] - read[first + 1]
    told = [record.message for record in caplog.records]
    assert any("planned again" in message for message in told) and any("the new one is followed" in m for m in told)
    trace, made = Trace.load(out["trace_out"]), Plan.load(out["plan_out"])
    link = trace.hardware.link("storage", "device")
    assert link is not None and link.bytes_per_second == pytest.approx(SLOW_READ, rel=0.01)
    assert made.trace_fingerprint == trace.fingerprint and made.policy == "ilp" and made.predicted is not None
    assert made.predicted.iteration_seconds == progress[-1].predicted_iteration_seconds
