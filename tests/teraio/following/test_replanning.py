"""A real run whose drive turns out slower than measured: another plan takes over while it trains, and no bit changes."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
import teraio
from runtime.transfer import Engine, LinkRates
from teraio.machine import Machine, Shared
from teraio.planning import PlanningJob
from teraio.registry import REGISTRY

from ...training import begin, unequal

MIB = 1 << 20
ROWS, WIDTH, HIDDEN = 128, 64, 4096
RATES = LinkRates(
    write_bytes_per_second=4e9,
    read_bytes_per_second=4e9,
    write_latency_seconds=0.0,
    read_latency_seconds=0.0,
    duplex_write_bytes_per_second=4e9,
    duplex_read_bytes_per_second=4e9,
)
SLOW_READ = 1e6
"""Bytes per second: a block of 1 MiB takes about a second, and all stages together take less, also on a busy machine."""


class ZeroInfinityJob(PlanningJob):
    """Offloads everything, where the integer program would not."""

    def _solve(
        self, paths: tuple[str, str], stdin: int, trace: planner.Trace, budgets: planner.Budgets, seconds: float
    ) -> planner.Plan:
        return planner.plan(trace, budgets, policy="zero-infinity")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def layers() -> nn.Module:
    return nn.Sequential(Layer(), Layer(), Layer(), nn.Linear(WIDTH, HIDDEN))


def momentum(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)]


def train(options: dict[str, Any], steps: int) -> tuple[list[torch.Tensor], list[teraio.Status]]:
    """Losses, then parameters; and the state after each step."""
    training = begin(layers, momentum, options)
    inputs, targets = torch.randn(ROWS, WIDTH), torch.randint(0, HIDDEN, (ROWS,))
    losses: list[torch.Tensor] = []

    def step(batch: torch.Tensor, index: int) -> None:
        (sgd,) = training.optimizers
        sgd.zero_grad()
        loss = nn.functional.cross_entropy(training.model(batch), targets)
        loss.backward()
        sgd.step()
        losses.append(loss.detach().clone())

    training.run(itertools.repeat(inputs, steps), step, planned=True)
    return [*losses, *training.finish().values()], [status for (status,) in training.progress]


BUSY_SECONDS = Machine.busy_seconds


def busy_seconds(machine: Machine) -> dict[str, float]:
    """Of reads at `SLOW_READ`: however busy the processor is, no stage is long enough to hide many of them."""
    read = {link: size / SLOW_READ for link, size in machine.moved_bytes().items() if link == "storage->device"}
    return BUSY_SECONDS(machine) | read


@pytest.fixture
def slow_drive(monkeypatch: pytest.MonkeyPatch, subgroups_of: Callable[[int], None]) -> None:
    """Taken for one of 4 GB/s before training."""
    monkeypatch.setattr(Engine, "measure", lambda engine: RATES)
    monkeypatch.setattr(REGISTRY, "shared", Shared())
    monkeypatch.setattr(Machine, "busy_seconds", busy_seconds)
    subgroups_of(MIB)


def test_another_plan_takes_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, slow_drive: None
) -> None:
    steps = 18
    reference, free = train({}, steps)
    budget = int(0.75 * free[-1].device_peak_bytes)
    kinds = itertools.chain([ZeroInfinityJob], itertools.repeat(PlanningJob))  # the first plan, and those after it

    def start_job(trace: planner.Trace, budgets: planner.Budgets, *, time_limit_seconds: float) -> PlanningJob:
        return next(kinds)(trace, budgets, time_limit_seconds=time_limit_seconds)

    monkeypatch.setattr(REGISTRY, "parts", dataclasses.replace(REGISTRY.parts, start_job=start_job))
    out = {"trace_out": tmp_path / "trace.json", "plan_out": tmp_path / "plan.json"}
    with caplog.at_level(logging.INFO, logger="teraio"):
        values, progress = train({"memory_budget": budget, "storage": tmp_path, "profile_iterations": 1, **out}, steps)
    assert not unequal(values, reference)
    phases = [status.phase for status in progress]
    first = phases.index("planned")
    assert set(phases[first:]) == {"planned"} and progress[first].replans == 0
    after = progress[-1]
    assert after.replans == 1 and 0 < after.device_peak_bytes <= budget
    read = [status.moved_bytes["storage->device"] for status in progress]
    assert read[-1] - read[-2] < read[first + 2] - read[first + 1]
    told = [record.message for record in caplog.records]
    assert any("planned again" in message for message in told) and any("the new one is followed" in m for m in told)
    trace, plan = planner.Trace.load(out["trace_out"]), planner.Plan.load(out["plan_out"])
    link = trace.hardware.link("storage", "device")
    assert link is not None and link.bytes_per_second == pytest.approx(SLOW_READ, rel=0.01)
    assert plan.trace_fingerprint == trace.fingerprint and plan.policy == "ilp"
    assert plan.predicted is not None and plan.predicted.iteration_seconds == after.predicted_iteration_seconds
