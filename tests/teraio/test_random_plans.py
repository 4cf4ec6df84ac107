"""Plans that nobody would choose, carried out by the real runtime: the same bits as without a budget, within the budget.

The trace is a real one, of a profiled run of the same small model; the plans are random but feasible.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import teraio
from planner import Budgets, Trace, floor
from planner.problem import live_bytes

from ..planner.strategies import random_plan
from ..thoroughness import by_profile
from ..training import begin, unequal

pytestmark = pytest.mark.usefixtures("same_program_at_every_budget", "deterministic")

MIB = 1 << 20
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


def train(options: dict[str, Any], *, accumulate: int, seed: int = 0) -> Result:
    """Train from a fresh state; `accumulate` batches to an iteration."""
    training = begin(Model, momentum, options)
    drawn = torch.Generator().manual_seed(seed)
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

    steps = ([torch.randint(0, HIDDEN, (ROWS,), generator=drawn) for _ in range(accumulate)] for _ in range(STEPS))
    training.run(steps, step)
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
    plan = random_plan(known.trace, Budgets(device_bytes=budget, host_bytes=host), draw)
    assert len(plan.moves) > 5
    path = tmp_path / "plan.json"
    plan.save(path)
    options = {"memory_budget": budget, "plan": path, "profile_iterations": 1, **lower(tiers, tmp_path)}
    options["debug"] = seed % 2 == 1
    result = train(options, accumulate=accumulate)
    check(result, known.reference, budget)
    phases = [status.phase for status in result.progress]
    assert phases[-4:] == ["planned"] * 4, phases
    assert result.progress[-1].deviations <= 1
    for tier in {move.tier for move in plan.moves}:
        moved = [status.moved_bytes[f"{tier}->device"] for status in result.progress[-2:]]
        assert moved[0] < moved[1], "the plan's moves happen in every iteration"
