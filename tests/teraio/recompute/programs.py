"""Programs whose forward stages can run again, and plans in which they do, compared bit for bit with training without a budget.

The trace is a real one, of a profiled run of the same program. The plans are random: which groups run again, and where, and what
waits in which tier. No planner would choose them.
"""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner import Budgets, Plan, Recompute, Trace, floor, recomputed
from planner.errors import BudgetError, PlanError
from planner.problem import folded, live_bytes

from ...planner.strategies import random_plan
from ...training import MIB, require
from ..parity.harness import Case, Result, Run, check_exact, train
from ..parity.models import HIDDEN, WIDTH, Wide

STEPS = 6
"""One compiles, two are profiled, the others run by the plan."""
PLANNED = 3
ROWS = 128


class Model(nn.Module):
    """Token features through layers and a norm: indices [rows] to logits [rows, 4096]."""

    def __init__(self, layers: int = 3, drop: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(HIDDEN, WIDTH)
        self.layers = nn.Sequential(*[Wide(drop) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, indices: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.embed(indices))))


def batch(number: int, rows: int = ROWS) -> Tensor:
    return torch.randint(0, HIDDEN, (rows,), generator=torch.Generator().manual_seed(number))


class Tied(nn.Module):
    """The embedding's weights are those of the head; one layer is used twice, and a view of its result is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.last = nn.Embedding(HIDDEN, WIDTH), Wide(), Wide()
        self.head = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, indices: Tensor) -> Tensor:
        x = self.layer(self.layer(self.embed(indices)))
        wide = torch.tanh(self.last.up(x)).view(-1, 2, HIDDEN // 2).transpose(1, 2)
        return self.head(x + torch.sigmoid(wide).transpose(1, 2).reshape(-1, HIDDEN)[:, :WIDTH])


class Pictures(nn.Module):
    """Convolutions with batch norm: indices [rows] to logits. Activations take most of its memory, so that they have to leave."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(HIDDEN // 64, 3 * 256)
        self.first, self.norm1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.norm2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.third, self.norm3 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.last, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, HIDDEN)

    def forward(self, indices: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.first(self.embed(indices // 64).view(-1, 3, 16, 16))))
        x = torch.relu(self.norm3(self.third(torch.tanh(self.norm2(self.second(x))))))
        return self.head(torch.relu(self.last(x)).mean(dim=(2, 3)))


# -- what a step runs


def loss_of(run: Run, indices: Tensor) -> Tensor:
    loss: Tensor = functional.cross_entropy(run.model(indices), indices.flip(0))
    return loss


def one_pass(run: Run, number: int, rows: int = ROWS) -> None:
    loss = loss_of(run, batch(number, rows))
    loss.backward()
    run.record_loss(loss)


def accumulating(run: Run, number: int) -> None:
    """Two forward passes, then their backward passes the other way round."""
    losses = [loss_of(run, batch(2 * number + turn)) for turn in range(2)]
    for loss in reversed(losses):
        loss.backward()
        run.record_loss(loss)


def twice_through_one_graph(run: Run, number: int) -> None:
    loss = loss_of(run, batch(number))
    loss.backward(retain_graph=True)
    loss.backward()
    run.record_loss(loss)


def in_bfloat16(run: Run, number: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(run, batch(number, 4 * ROWS))
    loss.backward()
    run.record_loss(loss)


def changing_lengths(run: Run, number: int) -> None:
    for rows in (ROWS, ROWS + 24):
        one_pass(run, number, rows)


def whole_step(passes: Callable[[Run, int], None], run: Run, number: int, index: int) -> None:
    run.optimizer.zero_grad()
    passes(run, number)
    run.record_gradients()
    run.optimizer.step()
    run.record("random state", torch.get_rng_state())


def numbers(steps: int) -> list[int]:
    return list(range(steps))


def program(
    make: Callable[[], nn.Module] = Model,
    passes: Callable[[Run, int], None] = one_pass,
    options: dict[str, Any] | None = None,
    **compile_options: Any,
) -> Case:
    step = partial(whole_step, passes)
    case = Case(make_model=make, make_batches=numbers, step=step, steps=STEPS, options=options or {})
    return replace(case, compile_options=compile_options)


PLAIN = program()
PROGRAMS = {
    "accumulating": program(passes=accumulating),
    "changing lengths": program(passes=changing_lengths, dynamic=True),
    "tied weights and views": program(Tied),
    "autocast": program(passes=in_bfloat16),
    "batch norm": program(Pictures),
    "retain_graph": program(passes=twice_through_one_graph),
}

# -- plans


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """A reference run without a budget, and the trace of a run with one."""

    reference: Result
    trace: Trace


@functools.cache
def without_a_budget(trained: Case) -> Result:
    """The reference run, once in this process."""
    reference = train(trained)
    require(reference.status.phase == "fits", "the reference fits")
    return reference


@functools.cache
def profiled(trained: Case, *, tier: str = "storage") -> Profiled:
    """Train without a budget, and with one of 0.8 of the peak to get a trace: once in this process for equal programs."""
    reference = without_a_budget(trained)
    budget = int(0.8 * reference.status.device_peak_bytes)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "profiled.json"
        check(train(trained, options={"memory_budget": budget, "trace_out": path, **lower(tier, folder)}), reference, budget)
        return Profiled(reference=reference, trace=Trace.load(path))


def lower(tier: str, folder: Path) -> dict[str, Any]:
    """The options for "storage", "host", or "both", where the host tier has no room for all that must wait."""
    where: dict[str, Any] = {} if tier == "host" else {"storage": folder}
    where |= {"host": {"host_budget": 256 * MIB}, "both": {"host_budget": 12 * MIB}}.get(tier, {})
    return {**where, "host_updates": False, "profile_iterations": 1, "replan": False}


def check(result: Result, reference: Result, budget: int) -> None:
    check_exact(result, reference)
    assert 0 < result.status.device_peak_bytes <= budget


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
    trained: Case,
    known: Profiled,
    folder: Path,
    seed: int,
    *,
    share: float = 1.0,
    tier: str = "storage",
    debug: bool = False,
    at_least: int = 0,
) -> Result:
    """Train by a random plan, and check that all is the same. share: of the groups that run again.

    at_least: bytes of the budget.
    """
    draw = random.Random(seed)
    chosen = random_groups(known.trace, draw, share)
    assert chosen or not share, "nothing runs again"
    derived = recomputed(known.trace, chosen)
    smallest, _ = floor(derived)
    # Somewhat above the smallest one: in this run, memory that user code holds may differ by a tensor or two.
    budget = int(smallest + 0.3 * (max(live_bytes(derived)) - smallest)) + MIB
    budget = max(budget, at_least)
    host = lower(tier, folder).get("host_budget")
    plan = plan_with_reruns(known, Budgets(device_bytes=budget, host_bytes=host), chosen, draw)
    assert len(plan.moves) > 5 or share
    path = folder / "plan.json"
    plan.save(path)
    try:
        result = train(trained, options={"memory_budget": budget, "plan": path, "debug": debug, **lower(tier, folder)})
    except BudgetError as error:  # what compiled graphs are taken to need can be more than was measured
        assert error.smallest_bytes > at_least
        return follow(trained, known, folder, seed, share=share, tier=tier, debug=debug, at_least=error.smallest_bytes)
    check(result, known.reference, budget)
    phases = [status.phase for (status,) in result.progress]
    assert phases[-PLANNED:] == ["planned"] * PLANNED, phases
    last = result.status
    # A block that happens to be on its way elsewhere is not dropped, and then its stage need not run again.
    assert (last.recomputed_stages > 0) is (last.recomputed_bytes > 0) is bool(share) and last.recomputed_stages <= len(chosen)
    for tier in {move.tier for move in plan.moves if not share}:
        (before,), (after,) = result.progress[-2:]
        assert before.moved_bytes[f"{tier}->device"] < after.moved_bytes[f"{tier}->device"], "in every iteration"
    return result
