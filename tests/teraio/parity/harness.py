"""Train a case three ways (eager; teraio without a budget; teraio under one) and compare what came out.

The budgeted run must equal the unbudgeted one bit for bit: the same stages ran, on other pages. Against eager
the arithmetic differs (decompositions, fusion): tensors must agree within `EAGER_TOLERANCE`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...training import begin, require

EAGER_TOLERANCE = 1e-4
"""Largest allowed |a - b| against eager, as a fraction of the tensor's largest |b| (plus `EAGER_FLOOR`)."""
EAGER_FLOOR = 1e-8
"""Absolute part of the tolerance, for tensors that are all but zero."""

PLANNED_STEPS = 7
"""Enough to compile (1), profile (3), plan while training goes on (1) and train by the plan (2)."""
SOLVER_SECONDS = 3
"""Enough for a good plan. That a plan is the best one is nothing that parity needs."""
MIB = 1 << 20

Batch = tuple[Tensor, Tensor]

compiled_input_needs_grad = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")
"""For cases where a compiled part's output enters another: Dynamo reads its `.grad`, and PyTorch warns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is trained, and how.

    make_model, make_optimizer: called after seeding, so that all runs start alike.
    make_batches: the batches of the steps, in order; called once per run with the number of steps.
    step: one iteration of the user's loop, which ends with an optimizer step; records what is compared.
    compile_parts: names of children to compile one by one; empty compiles the whole model as one.
    compile_options: further keyword arguments of `torch.compile`.
    steps: how many; by default 3, or as many as it takes to get to a plan.
    planned: let a plan take over, and check that it did; else the run stays on demand.
    """

    make_model: Callable[[], nn.Module]
    make_batches: Callable[[int], list[Batch]]
    step: Callable[[Run, Batch, int], None] = field(default_factory=lambda: plain_step)
    make_optimizer: Callable[[nn.Module], Optimizer] = field(default_factory=lambda: sgd)
    make_scheduler: Callable[[Optimizer], Any] | None = None
    compute_loss: Callable[[nn.Module, Batch], Tensor] = field(default_factory=lambda: cross_entropy)
    steps: int | None = None
    compile_parts: tuple[str, ...] = ()
    compile_options: Mapping[str, Any] = field(default_factory=dict)
    planned: bool = False


@dataclass(slots=True, kw_only=True)
class Run:
    """One training run, as a case's step sees it; `record*` keep copies of what is compared later."""

    case: Case
    module: nn.Module
    model: nn.Module
    optimizer: Optimizer
    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    observed: list[tuple[str, Tensor]] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)

    def loss(self, batch: Batch) -> Tensor:
        """The loss of `batch` through the compiled model."""
        return self.case.compute_loss(self.model, batch)

    def record_loss(self, loss: Tensor) -> None:
        self.losses.append(loss.detach().clone())

    def record_gradients(self) -> None:
        """Copy the gradient of every parameter that has one; a sparse one as a dense tensor."""
        gradients = {name: p.grad.detach() for name, p in self.module.named_parameters() if p.grad is not None}
        found = {name: g.to_dense() if g.is_sparse else g.clone() for name, g in gradients.items()}
        self.gradients.append(found)

    def record(self, name: str, value: Tensor) -> None:
        self.observed.append((name, value.detach().clone()))


@dataclass(frozen=True, slots=True)
class Result:
    """What a run computed, in order, and `progress`: teraio's status after every step (empty under eager)."""

    losses: tuple[Tensor, ...]
    gradients: tuple[dict[str, Tensor], ...]
    observed: tuple[tuple[str, Tensor], ...]
    parameters: dict[str, Tensor]
    progress: tuple[tuple[Any, ...], ...]

    def named(self) -> dict[str, Tensor]:
        """Losses, gradients, observations, parameters and buffers, each under a name of its own."""
        named = {f"loss {i}": loss for i, loss in enumerate(self.losses)}
        for i, gradients in enumerate(self.gradients):
            named |= {f"gradient {i} of {name}": value for name, value in gradients.items()}
        named |= {f"observation {i}, {name}": value for i, (name, value) in enumerate(self.observed)}
        return named | {f"final {name}": value for name, value in self.parameters.items()}


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy of `model(inputs)` [..., classes] against `targets` [...]."""
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def sgd(module: nn.Module) -> Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def plain_step(run: Run, batch: Batch, index: int) -> None:
    """Forward, backward, update; records the loss and all gradients."""
    run.optimizer.zero_grad()
    loss = run.loss(batch)
    loss.backward()
    run.record_loss(loss)
    run.record_gradients()
    run.optimizer.step()


def train(case: Case, *, backend: str | None, options: Mapping[str, Any] | None = None) -> Result:
    """Run `case` under `backend` (None: eager, nothing compiled) with `options`, from a fresh process state.

    Leaves no runtime behind. Raises what the case's step raises.
    """
    given = None if backend is None else dict(options or {})
    training = begin(
        case.make_model,
        lambda module: [case.make_optimizer(module)],
        given,
        backend=backend or "",
        seed=1,
        parts=case.compile_parts,
        **case.compile_options,
    )
    run = Run(case=case, module=training.module, model=training.model, optimizer=training.optimizers[0])
    scheduler = case.make_scheduler(run.optimizer) if case.make_scheduler else None

    def step(batch: Batch, index: int) -> None:
        case.step(run, batch, index)
        if scheduler is not None:
            scheduler.step()

    batches = case.make_batches(case.steps or (PLANNED_STEPS if case.planned else 3))
    torch.manual_seed(2)
    training.run(_handed_over(batches), step, planned=case.planned)
    recorded = (tuple(run.losses), tuple(run.gradients), tuple(run.observed))
    return Result(*recorded, training.finish(), tuple(training.progress))


def _handed_over(batches: list[Batch]) -> Iterator[Batch]:
    """The batches one by one, kept by nobody else, as from a data loader: a budget has to hold those that are kept."""
    while batches:
        yield batches.pop(0)


def budget_between(unbudgeted: Result, fraction: float) -> int:
    """The bytes at `fraction` of the way from what the case needs at least to its unconstrained peak.

    At least: what the run reports as its floor, and what it takes to update a small model in one go: every
    parameter, its gradient and two states, and a little for temporaries.
    """
    statuses = unbudgeted.progress[-1]
    peak = max(s.device_peak_bytes for s in statuses)
    update = 4 * sum(value.nbytes for value in unbudgeted.parameters.values()) + 4 * MIB
    least = max(update, *(s.floor_bytes or 0 for s in statuses))
    require(least < peak, f"no room between the least {least} and the peak {peak} bytes: change the model")
    return int(least + fraction * (peak - least))


def check_parity(case: Case, tmp_path: Path, *, codegen: str = "eager", fraction: float = 0.3, debug: bool = False) -> Result:
    """Run `case` all three ways, compare, and return the budgeted result.

    fraction: where the budget lies between what is needed at least (0) and the unconstrained peak (1).
    debug: the budgeted run poisons memory that holds nothing, and compares what comes back with what left.
    The budgeted run must have moved blocks both ways, have stayed under its budget, and, for a planned case,
    have run by a plan.
    """
    eager = train(case, backend=None)
    unbudgeted = train(case, backend="teraio", options={"codegen": codegen, "storage": str(tmp_path)})
    budget = budget_between(unbudgeted, fraction)
    options = budgeted_options(case, tmp_path, budget=budget, codegen=codegen) | {"debug": debug}
    budgeted = train(case, backend="teraio", options=options)
    require(not any(moved_bytes(unbudgeted.progress[-1]).values()), "the run without a budget moved blocks")
    check_exact(budgeted, unbudgeted)
    check_close(budgeted, eager)
    check_budget(budgeted, budget)
    if case.planned:
        check_planned(budgeted)
    return budgeted


def budgeted_options(case: Case, tmp_path: Path, *, budget: int, codegen: str) -> dict[str, Any]:
    return {
        "codegen": codegen,
        "memory_budget": budget,
        "storage": str(tmp_path),
        "storage_budget": 1024 * MIB,
        "profile_iterations": 2 if case.planned else 1000,
        "solver_time_limit": SOLVER_SECONDS,
    }


def check_exact(result: Result, reference: Result) -> None:
    """Raises AssertionError unless all tensors of `result` equal those of `reference` bit for bit."""
    _compare(result, reference, torch.equal, "bit for bit")


def check_close(result: Result, reference: Result, tolerance: float = EAGER_TOLERANCE) -> None:
    """Raises AssertionError unless all tensors agree within `tolerance` of their largest element."""

    def close(a: Tensor, b: Tensor) -> bool:
        if a.shape != b.shape or not a.is_floating_point():
            return torch.equal(a, b)
        limit = tolerance * float(b.abs().max()) + EAGER_FLOOR
        return bool(((a - b).abs() <= limit).all())  # all(): NaN must not pass

    _compare(result, reference, close, f"within {tolerance}")


def _compare(result: Result, reference: Result, same: Callable[[Tensor, Tensor], bool], how: str) -> None:
    ours, theirs = result.named(), reference.named()
    require(bool(reference.losses), "the reference recorded nothing to compare")
    require(ours.keys() == theirs.keys(), f"recorded by one run only: {sorted(ours.keys() ^ theirs.keys())}")
    wrong = [f"{n}: {_difference(v, theirs[n])}" for n, v in ours.items() if not same(v, theirs[n])]
    listed = "\n  ".join(wrong[:12])
    require(not wrong, f"{len(wrong)} of {len(ours)} tensors are not equal {how}:\n  {listed}")


def _difference(value: Tensor, other: Tensor) -> str:
    if value.shape != other.shape:
        return f"shape {tuple(value.shape)} in place of {tuple(other.shape)}"
    return f"differs by up to {float((value.double() - other.double()).abs().max()):.3g}"


def moved_bytes(statuses: Iterable[Any]) -> dict[str, int]:
    """Bytes moved since the start per link, over all runtimes."""
    total = Counter({"device->storage": 0, "storage->device": 0})
    for status in statuses:
        total.update(status.moved_bytes)
    return dict(total)


def check_budget(result: Result, budget: int) -> None:
    """Raises AssertionError unless all runtimes stayed under `budget` bytes and blocks moved out and back."""
    statuses = result.progress[-1]
    require(bool(statuses), "there is no runtime: the model was not compiled by teraio")
    for status in statuses:
        require(status.device_budget_bytes == budget, f"budget {status.device_budget_bytes}, not {budget}")
        peak = status.device_peak_bytes
        require(0 < peak <= budget, f"device peak {peak} against a budget of {budget} bytes")
    for link in ("device->storage", "storage->device"):
        moved = moved_bytes(statuses)
        require(moved[link] > 0, f"nothing moved {link} under {budget} bytes: {moved}")


def check_planned(result: Result) -> None:
    """Raises AssertionError unless a plan ran two iterations in a row, and blocks came back by it.

    What has not changed since it came is not written when it leaves again.
    """
    phases = [[status.phase for status in statuses] for statuses in result.progress]
    pairs = [
        (before, after)
        for before, after in pairwise(result.progress)
        if all(status.phase == "planned" for status in before + after)
    ]
    require(bool(pairs), f"no plan took over; phases after each step: {phases}")
    last = pairs[-1][1]
    require(all(s.predicted_iteration_seconds for s in last), "the plan in force predicts no duration")
    moved = [(moved_bytes(p[0])["storage->device"], moved_bytes(p[1])["storage->device"]) for p in pairs]
    require(all(then < now for then, now in moved), f"nothing came back by the plan: {moved}")
