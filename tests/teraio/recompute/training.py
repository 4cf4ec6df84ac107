"""Trainings by plans in which forward stages run again, compared bit for bit with training without a budget.

The trace is a real one, of a profiled run of the same program. The plans are random: which groups run again, and where, and what
waits in which tier. No planner would choose them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import teraio
from planner import Budgets, Plan, Recompute, Trace, floor, recomputed
from planner.errors import BudgetError, PlanError
from planner.problem import folded, live_bytes

from ...planner.strategies import random_plan
from ...training import Training, begin, require, unequal

MIB = 1 << 20
STEPS = 6
"""One compiles, two are profiled, the others run by the plan."""
PLANNED = 3

Step = Callable[[Training, int, list[Tensor]], None]
"""One iteration: takes its number, and appends what has to be the same bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What is trained. options: further ones of the backend. compile_options: of `torch.compile`."""

    make: Callable[[], nn.Module]
    step: Step
    options: dict[str, Any]
    compile_options: dict[str, Any]


def program(make: Callable[[], nn.Module], step: Step, options: dict[str, Any] | None = None, **compile_options: Any) -> Program:
    return Program(make=make, step=step, options=options or {}, compile_options=compile_options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All that is compared bit for bit, and the state of teraio after each step."""

    values: list[Tensor]
    progress: list[teraio.Status]


def train(trained: Program, options: dict[str, Any]) -> Result:
    """Train from a fresh state. Compared are what the steps note, gradients, parameters, buffers and the random state."""
    training = begin(trained.make, momentum, {**trained.options, **options}, **trained.compile_options)
    values: list[Tensor] = []

    def step(number: int, index: int) -> None:
        (sgd,) = training.optimizers
        sgd.zero_grad()
        trained.step(training, number, values)
        values.extend(p.grad.clone() for p in training.module.parameters() if p.grad is not None)
        sgd.step()
        values.append(torch.get_rng_state())

    training.run(range(STEPS), step)
    values += training.finish().values()
    return Result(values=values, progress=[status for (status,) in training.progress])


def momentum(module: nn.Module) -> list[Optimizer]:
    return [torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """A reference run without a budget, and the trace of a run with one."""

    reference: Result
    trace: Trace


def profiled(trained: Program, folder: Path, *, share: float = 0.8, tier: str = "storage") -> Profiled:
    """Train without a budget, and with one to get a trace. share: of the peak, as the budget."""
    reference = train(trained, {})
    require(reference.progress[-1].phase == "fits", "the reference fits")
    peak = reference.progress[-1].device_peak_bytes
    path = folder / "profiled.json"
    result = train(trained, {"memory_budget": int(share * peak), "trace_out": path, **lower(tier, folder)})
    check(result, reference, int(share * peak))
    return Profiled(reference=reference, trace=Trace.load(path))


def lower(tier: str, folder: Path) -> dict[str, Any]:
    """The options for "storage" or "host"."""
    where: dict[str, Any] = {"storage": folder} if tier == "storage" else {"host_budget": 256 * MIB}
    return {**where, "host_updates": False, "profile_iterations": 1, "replan": False}


def check(result: Result, reference: Result, budget: int) -> None:
    wrong = unequal(result.values, reference.values)
    assert not wrong, f"{len(wrong)} of {len(result.values)} values, such as {wrong[:5]}"
    assert 0 < result.progress[-1].device_peak_bytes <= budget


def random_groups(trace: Trace, draw: random.Random, share: float) -> list[Recompute]:
    """Some groups, each at a place where it may run again and is of use."""
    chosen: list[Recompute] = []
    for group in trace.recompute:
        if draw.random() < share:
            uses = sorted({use for i in group.blocks for use in trace.blocks[i].uses if trace.stages[use].phase == "backward"})
            for at in draw.sample(uses, len(uses)):
                try:
                    recomputed(trace, [*chosen, Recompute(group=group.id, at=at)])
                except PlanError:
                    continue
                chosen.append(Recompute(group=group.id, at=at))
                break
    return chosen


def plan_with_reruns(known: Profiled, budgets: Budgets, chosen: Sequence[Recompute], draw: random.Random) -> Plan:
    """A random plan in which `chosen` run again."""
    return folded(known.trace, chosen, random_plan(recomputed(known.trace, chosen), budgets, draw))


def follow(
    trained: Program,
    known: Profiled,
    folder: Path,
    seed: int,
    *,
    share: float = 1.0,
    tier: str = "storage",
    debug: bool = False,
    at_least: int = 0,
) -> Result:
    """Train by a random plan with re-runs, and check that all is the same. share: of the groups that run again.

    at_least: bytes of the budget.
    """
    draw = random.Random(seed)
    chosen = random_groups(known.trace, draw, share)
    assert chosen, "nothing runs again"
    derived = recomputed(known.trace, chosen)
    smallest, _ = floor(derived)
    # Somewhat above the smallest one: in this run, memory that user code holds may differ by a tensor or two.
    budget = int(smallest + 0.3 * (max(live_bytes(derived)) - smallest)) + MIB
    budget = max(budget, at_least)
    host = lower(tier, folder).get("host_budget")
    plan = plan_with_reruns(known, Budgets(device_bytes=budget, host_bytes=host), chosen, draw)
    path = folder / "plan.json"
    plan.save(path)
    try:
        result = train(trained, {"memory_budget": budget, "plan": path, "debug": debug, **lower(tier, folder)})
    except BudgetError as error:  # what compiled graphs are taken to need can be more than was measured
        assert error.smallest_bytes > at_least
        return follow(trained, known, folder, seed, share=share, tier=tier, debug=debug, at_least=error.smallest_bytes)
    check(result, known.reference, budget)
    phases = [status.phase for status in result.progress]
    assert phases[-PLANNED:] == ["planned"] * PLANNED, phases
    last = result.progress[-1]
    # A block that happens to be on its way elsewhere is not dropped, and then its stage need not run again.
    assert 0 < last.recomputed_stages <= len(chosen) and last.recomputed_bytes > 0
    return result
