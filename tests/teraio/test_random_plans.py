"""Plans carried out by the real runtime: the same bits as without a budget, within the budget.

Random ones, which nobody would choose but which are feasible, for a real trace of the same small model; and one that is replaced
while it trains, as the drive turns out slower than measured.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import teraio
from planner import Budgets, Plan, Trace, floor, plan
from planner.problem import live_bytes
from runtime.transfer import Engine, LinkRates
from teraio.machine import Machine, Shared
from teraio.registry import REGISTRY

from ..planner.strategies import random_plan
from ..thoroughness import by_profile
from ..training import MIB, begin, unequal
from .in_process import InstantJob

pytestmark = pytest.mark.usefixtures("same_program_at_every_budget", "deterministic")

ROWS, WIDTH, HIDDEN = 128, 64, 4096
STEPS = 7
"""One compiles, two are profiled, the others run by the plan."""


class Layer(nn.Module):
    """Residual layer with two weights of 1 MiB; its activations take 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Token features through three layers and a norm: indices [rows] to logits [rows, 4096]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(HIDDEN, WIDTH)
        self.layers = nn.Sequential(*[Layer() for _ in range(3)])
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, indices: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.embed(indices))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All that is compared bit for bit, and the state of teraio after each step."""

    values: list[Tensor]
    progress: list[teraio.Status]


def train(options: dict[str, Any], *, accumulate: int = 1, count: int = STEPS) -> Result:
    """Train from a fresh state; `accumulate` batches to an iteration."""
    training = begin(Model, momentum, options)
    drawn = torch.Generator().manual_seed(0)
    values: list[Tensor] = []

    def step(batches: list[Tensor], index: int) -> None:
        (sgd,) = training.optimizers
        sgd.zero_grad()
        for indices in batches:
            loss = nn.functional.cross_entropy(training.model(indices), indices.flip(0))
            loss.backward()
            values.append(loss.detach().clone())
        values.extend(p.grad.clone() for p in training.module.parameters() if p.grad is not None)
        sgd.step()

    steps = ([torch.randint(0, HIDDEN, (ROWS,), generator=drawn) for _ in range(accumulate)] for _ in range(count))
    training.run(steps, step, planned=True)
    values += training.finish().values()
    return Result(values=values, progress=[status for (status,) in training.progress])


def momentum(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """A reference run without a budget, and the trace of a run with one."""

    reference: Result
    trace: Trace


_profiled: dict[tuple[int, str], Profiled] = {}
HOST_BYTES = 12 * MIB
"""Of the host tier where there is storage as well: not enough for all that must wait."""


def lower(tiers: str, folder: Path) -> dict[str, Any]:
    """The options for "storage", "host" or "both"."""
    host = {"host": {"host_budget": 80 * MIB}, "both": {"host_budget": HOST_BYTES}}.get(tiers, {})
    where = host if tiers == "host" else {"storage": folder, **host}
    return {**where, "host_updates": False}  # which round differently


def profiled(accumulate: int, tiers: str, folder: Path) -> Profiled:
    if (accumulate, tiers) not in _profiled:
        reference = train({}, accumulate=accumulate)
        assert reference.progress[-1].phase == "fits"
        peak = reference.progress[-1].device_peak_bytes
        path = folder / "trace.json"
        options = {"memory_budget": int(0.7 * peak), "trace_out": path, "profile_iterations": 1, **lower(tiers, folder)}
        check(train(options, accumulate=accumulate), reference, int(0.7 * peak))
        _profiled[accumulate, tiers] = Profiled(reference=reference, trace=Trace.load(path))
    return _profiled[accumulate, tiers]


def check(result: Result, reference: Result, budget: int) -> None:
    assert not unequal(result.values, reference.values)
    assert 0 < result.progress[-1].device_peak_bytes <= budget


@pytest.mark.parametrize(
    ("accumulate", "tiers", "seed"),
    by_profile(
        ci=[(1, "storage", 0), (2, "both", 1), (1, "host", 0)],
        long=list(itertools.product((1, 2), ("storage", "host", "both"), range(4))),
    ),
)
def test_random_plans_give_the_same_bits(tmp_path: Path, seed: int, tiers: str, accumulate: int) -> None:
    known = profiled(accumulate, tiers, tmp_path)
    draw = random.Random(seed)
    smallest, _ = floor(known.trace)
    # Somewhat above the smallest one: in this run, memory that user code holds may differ by a tensor or two.
    budget = int(smallest + (0.25 + 0.4 * draw.random()) * (max(live_bytes(known.trace)) - smallest))
    host = lower(tiers, tmp_path).get("host_budget")
    drawn = random_plan(known.trace, Budgets(device_bytes=budget, host_bytes=host), draw)
    assert len(drawn.moves) > 5
    path = tmp_path / "plan.json"
    drawn.save(path)
    options = {"memory_budget": budget, "plan": path, "profile_iterations": 1, **lower(tiers, tmp_path)}
    options["debug"] = seed % 2 == 1
    result = train(options, accumulate=accumulate)
    check(result, known.reference, budget)
    phases = [status.phase for status in result.progress]
    assert phases[-4:] == ["planned"] * 4, phases
    assert result.progress[-1].deviations <= 1
    for tier in {move.tier for move in drawn.moves}:
        moved = [status.moved_bytes[f"{tier}->device"] for status in result.progress[-2:]]
        assert moved[0] < moved[1], "the plan's moves happen in every iteration"


# -- a plan that is replaced

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
BUSY_SECONDS = Machine.busy_seconds


def busy_seconds(machine: Machine) -> dict[str, float]:
    """Of reads at `SLOW_READ`: however busy the processor is, no stage is long enough to hide many of them."""
    read = {link: size / SLOW_READ for link, size in machine.moved_bytes().items() if link == "storage->device"}
    return BUSY_SECONDS(machine) | read


@pytest.fixture
def slow_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken for one of 4 GB/s before training."""
    monkeypatch.setattr(Engine, "measure", lambda engine: RATES)
    monkeypatch.setattr(REGISTRY, "shared", Shared())
    monkeypatch.setattr(Machine, "busy_seconds", busy_seconds)


class FirstMovesAll:
    """Plans at once: the first plan offloads everything, where the integer program would not."""

    def __init__(self) -> None:
        self.policies = itertools.chain(["zero-infinity"], itertools.repeat("ilp"))

    def __call__(self, trace: Trace, budgets: Budgets, *, time_limit_seconds: float) -> InstantJob:
        made = plan(trace, budgets, policy=next(self.policies), time_limit_seconds=time_limit_seconds)
        return InstantJob(trace, made)


def test_another_plan_takes_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, slow_drive: None
) -> None:
    steps = 18
    reference = train({}, count=steps)
    budget = int(0.75 * reference.progress[-1].device_peak_bytes)
    monkeypatch.setattr(REGISTRY, "parts", dataclasses.replace(REGISTRY.parts, start_job=FirstMovesAll()))
    out = {"trace_out": tmp_path / "trace.json", "plan_out": tmp_path / "plan.json"}
    options = {"memory_budget": budget, "storage": tmp_path, "profile_iterations": 1, **out}
    with caplog.at_level(logging.INFO, logger="teraio"):
        result = train(options, count=steps)
    check(result, reference, budget)
    phases = [status.phase for status in result.progress]
    first = phases.index("planned")
    assert set(phases[first:]) == {"planned"}
    assert (result.progress[first].replans, result.progress[-1].replans) == (0, 1)
    read = [status.moved_bytes["storage->device"] for status in result.progress]
    assert read[-1] - read[-2] < read[first + 2] - read[first + 1]
    told = [record.message for record in caplog.records]
    assert any("planned again" in message for message in told) and any("the new one is followed" in m for m in told)
    trace, made = Trace.load(out["trace_out"]), Plan.load(out["plan_out"])
    link = trace.hardware.link("storage", "device")
    assert link is not None and link.bytes_per_second == pytest.approx(SLOW_READ, rel=0.01)
    assert made.trace_fingerprint == trace.fingerprint and made.policy == "ilp" and made.predicted is not None
    assert made.predicted.iteration_seconds == result.progress[-1].predicted_iteration_seconds
