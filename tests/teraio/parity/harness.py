"""Trainings as users write them, one for each `Case`, and what must be the same in all of them, with and without a budget.

The budgeted run must equal the unbudgeted one bit for bit: the same stages ran, on other pages. Against eager
the arithmetic differs (decompositions, fusion): tensors must agree within `EAGER_TOLERANCE`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import teraio
from teraio.registry import REGISTRY
from teraio.stages import CutPolicy

from ...training import Training, begin, require

EAGER_TOLERANCE = 1e-4
"""Largest allowed |a - b| against eager, as a fraction of the tensor's largest |b| (plus `EAGER_FLOOR`)."""
EAGER_FLOOR = 1e-8
"""Absolute part of the tolerance, for tensors that are all but zero."""

PLANNED_STEPS = 7
"""Enough to compile (1), profile (3), plan while training goes on (1) and train by the plan (2)."""
SOLVER_SECONDS = 3
"""Enough for a good plan. That a plan is the best one is nothing that parity needs."""
MIB = 1 << 20

Batch = Any
"""What a step of the user's loop gets: by default inputs and targets."""

compiled_input_needs_grad = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")
"""For cases where a compiled part's output enters another: Dynamo reads its `.grad`, and PyTorch warns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is trained, and how.

    make_model, make_optimizer: called after seeding, so that all runs start alike. There may be several optimizers, or none.
    make_batches: the batches of the steps, in order; called once per run with the number of steps.
    step: one iteration of the user's loop, which ends with an optimizer step; records what is compared.
    compile_parts: names of children to compile one by one; empty compiles the whole model as one.
    compile_options: further keyword arguments of `torch.compile`. options: further ones of the backend.
    steps: how many; by default 3, or as many as it takes to get to a plan.
    planned: let a plan take over, and check that it did; else the run stays on demand.
    """

    make_model: Callable[[], nn.Module]
    make_batches: Callable[[int], list[Batch]]
    step: Callable[[Run, Batch, int], None] = field(default_factory=lambda: plain_step)
    make_optimizer: Callable[[nn.Module], Optimizer | list[Optimizer]] = field(default_factory=lambda: sgd)
    make_scheduler: Callable[[Optimizer], Any] | None = None
    compute_loss: Callable[[nn.Module, Batch], Tensor] = field(default_factory=lambda: cross_entropy)
    steps: int | None = None
    compile_parts: tuple[str, ...] = ()
    compile_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    planned: bool = False


@dataclass(slots=True, kw_only=True)
class Run:
    """One training run, as a case's step sees it; `record*` keep copies of what is compared later.

    options: of the backend. left: names of the parameters that had a gradient after each backward pass.
    """

    case: Case
    training: Training
    options: Mapping[str, Any] | None
    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    observed: list[tuple[str, Tensor]] = field(default_factory=list)
    left: list[set[str]] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> Any:
        return self.training.module

    @property
    def model(self) -> nn.Module:
        return self.training.model

    @property
    def optimizers(self) -> list[Optimizer]:
        return self.training.optimizers

    @property
    def optimizer(self) -> Any:
        return self.optimizers[0]

    def loss(self, batch: Batch) -> Tensor:
        """The loss of `batch` through the compiled model."""
        return self.case.compute_loss(self.model, batch)

    def backward(self, batch: Batch, scale: float = 1.0, **settings: Any) -> Tensor:
        """A forward and a backward pass. Returns the loss, which is recorded."""
        loss = scale * self.loss(batch)
        loss.backward(**settings)
        self.record_loss(loss)
        self.note_left()
        return loss

    def update(self) -> None:
        """The step of each optimizer, after which gradients are gone."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def note_left(self) -> None:
        self.left.append({name for name, p in self.module.named_parameters() if p.grad is not None})

    def record_loss(self, loss: Tensor) -> None:
        self.losses.append(loss.detach().clone())

    def record_gradients(self) -> None:
        """Copy the gradient of every parameter that has one; a sparse one as a dense tensor."""
        gradients = {name: p.grad.detach() for name, p in self.module.named_parameters() if p.grad is not None}
        found = {name: g.to_dense() if g.is_sparse else g.clone() for name, g in gradients.items()}
        self.gradients.append(found)

    def record(self, name: str, value: Tensor) -> None:
        self.observed.append((name, value.detach().clone()))

    def go(self, batches: list[Batch]) -> None:
        """Take a step for each of the batches, which are kept by nobody else, as from a data loader."""
        scheduler = self.case.make_scheduler(self.optimizer) if self.case.make_scheduler else None

        def step(batch: Batch, index: int) -> None:
            self.case.step(self, batch, index)
            if scheduler is not None:
                scheduler.step()

        self.training.run(_handed_over(batches), step, planned=self.case.planned)

    def states(self) -> dict[str, Tensor]:
        """Copies of the optimizers' states, by name; of a tensor over others, those."""
        found: dict[str, Tensor] = {}
        for optimizer in self.optimizers:
            for number, parameter in enumerate(self.module.parameters()):
                for name, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        found |= {f"{name}{inner} of {number}": each.clone() for inner, each in _plain(value).items()}
        return found

    def result(self) -> Result:
        """End the run."""
        states = self.states()
        recorded = (tuple(self.losses), tuple(self.gradients), tuple(self.observed))
        parameters = self.training.finish()
        moved, progress = self.training.states_moved, tuple(self.training.progress)
        return Result(*recorded, parameters, progress, states=states, left=self.left, moved_states=moved)


@dataclass(frozen=True, slots=True)
class Result:
    """What a run computed, in order, and `progress`: teraio's status after every step (empty under eager).

    left: see `Run`. moved_states: names of the optimizer states that were in a lower tier after some step.
    """

    losses: tuple[Tensor, ...]
    gradients: tuple[dict[str, Tensor], ...]
    observed: tuple[tuple[str, Tensor], ...]
    parameters: dict[str, Tensor]
    progress: tuple[tuple[Any, ...], ...]
    states: dict[str, Tensor] = field(default_factory=dict)
    left: list[set[str]] = field(default_factory=list)
    moved_states: set[str] = field(default_factory=set)

    @property
    def status(self) -> teraio.Status:
        """The last one of the first run."""
        return self.progress[-1][0]

    @property
    def left_over(self) -> list[int]:
        """How many parameters had a gradient after each backward pass."""
        return [len(names) for names in self.left]

    def named(self, *, states: bool = True) -> dict[str, Tensor]:
        """Losses, gradients, observations, parameters, buffers and states, each under a name of its own."""
        named = {f"loss {i}": loss for i, loss in enumerate(self.losses)}
        for i, gradients in enumerate(self.gradients):
            named |= {f"gradient {i} of {name}": value for name, value in gradients.items()}
        named |= {f"observation {i}, {name}": value for i, (name, value) in enumerate(self.observed)}
        named |= {f"state {name}": value for name, value in self.states.items()} if states else {}
        return named | {f"final {name}": value for name, value in self.parameters.items()}


def _plain(value: Tensor) -> dict[str, Tensor]:
    if not is_traceable_wrapper_subclass(value):
        return {"": value}
    return {f".{name}": getattr(value, name) for name in value.__tensor_flatten__()[0]}


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy of `model(inputs)` [..., classes] against `targets` [...]."""
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def sgd(module: nn.Module) -> Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def plain_step(run: Run, batch: Batch, index: int) -> None:
    """Forward, backward, update; records the loss and all gradients."""
    run.optimizer.zero_grad()
    run.backward(batch)
    run.record_gradients()
    run.optimizer.step()


def start(case: Case, *, backend: str | None = "teraio", options: Mapping[str, Any] | None = None) -> Run:
    """Make what `case` trains under `backend` (None: eager, nothing compiled) with `options`, from a fresh process state."""
    # The same stages run with and without a budget, whatever is small.
    given = None if backend is None else {"tiles": "off", **case.options, **(options or {})}

    def make_optimizers(module: nn.Module) -> list[Optimizer]:
        made = case.make_optimizer(module)
        return made if isinstance(made, list) else [made]

    parts, further = case.compile_parts, case.compile_options
    training = begin(case.make_model, make_optimizers, given, backend=backend or "", seed=1, parts=parts, **further)
    return Run(case=case, training=training, options=given)


def train(case: Case, *, backend: str | None = "teraio", options: Mapping[str, Any] | None = None) -> Result:
    """Run `case`. See `start`. Leaves no runtime behind. Raises what the case's step raises."""
    run = start(case, backend=backend, options=options)
    batches = case.make_batches(case.steps or (PLANNED_STEPS if case.planned else 3))
    torch.manual_seed(2)
    run.go(batches)
    return run.result()


def _handed_over(batches: list[Batch]) -> Iterator[Batch]:
    """The batches one by one: a budget has to hold those that are kept."""
    while batches:
        yield batches.pop(0)


# -- with a budget between what the case needs at least and its peak


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


def check_parity(case: Case, folder: Path, *, codegen: str = "eager", fraction: float = 0.3, **options: Any) -> Result:
    """Run `case` eagerly, without a budget and with one, compare, and return the budgeted result.

    fraction: where the budget lies between what is needed at least (0) and the unconstrained peak (1).
    options: further ones of the budgeted run.
    The budgeted run must have moved blocks both ways, have stayed under its budget, and, for a planned case,
    have run by a plan.
    """
    unbudgeted = train(case, options={"codegen": codegen, "storage": str(folder)})
    require(not any(moved_bytes(unbudgeted.progress[-1]).values()), "the run without a budget moved blocks")
    budget = budget_between(unbudgeted, fraction)
    budgeted = train(case, options=budgeted_options(case, folder, budget=budget, codegen=codegen) | options)
    check_exact(budgeted, unbudgeted)
    check_budget(budgeted, budget)
    if case.planned:
        check_planned(budgeted)
    check_close(budgeted, train(case, backend=None))
    return budgeted


def budgeted_options(case: Case, folder: Path, *, budget: int, codegen: str = "eager") -> dict[str, Any]:
    return {
        "codegen": codegen,
        "memory_budget": budget,
        "storage": str(folder),
        "storage_budget": 1024 * MIB,
        "profile_iterations": 2 if case.planned else 1000,
        "solver_time_limit": SOLVER_SECONDS,
    }


# -- with a share of what the optimizer as it is takes


def unmanaged(case: Case) -> Result:
    """The run without a budget and without managed optimizers."""
    result = train(case, options={"optimizer": "off"})
    require(not any(result.status.moved_bytes.values()) and not result.moved_states, "blocks moved without a budget")
    return result


def reference(case: Case) -> Result:
    """As `unmanaged`, but trained only once in this process for equal cases, if nothing is kept from step to step."""
    if case.step is not one_update:
        return unmanaged(case)
    # Of the fixtures: other stages have another peak.
    return _kept(replace(case, planned=False), REGISTRY.parts.cut_policy, torch.get_num_threads())


def one_update(run: Run, batch: Batch, index: int) -> None:
    """A pass and an update by all optimizers."""
    run.backward(batch)
    run.update()


@functools.lru_cache(maxsize=8)
def _kept(case: Case, policy: CutPolicy | None, threads: int) -> Result:
    return unmanaged(case)


def share_of_peak(case: Case, folder: Path, fraction: float) -> dict[str, Any]:
    """The options of a budget of that fraction of what the unmanaged run took at its peak."""
    return budgeted_options(case, folder, budget=int(fraction * reference(case).status.device_peak_bytes))


def check_states(case: Case, folder: Path, *, states: int, fraction: float = 0.45, **options: Any) -> Result:
    """Train without teraio, and within `fraction` of what that takes at its peak. At least `states` states must leave.

    options: further ones of the run with a budget. Eager stages have the bits of a model that is not compiled.
    """
    expected = train(case, backend=None) if "codegen" not in case.options else reference(case)
    given = share_of_peak(case, folder, fraction) | options
    found = train(case, options=given)
    check_exact(found, expected)
    assert 0 < found.status.device_peak_bytes <= given["memory_budget"]
    assert len(found.moved_states) >= states, found.moved_states
    assert found.status.phase == ("planned" if case.planned else "profile")
    return found


# -- checks


def check_exact(result: Result, reference: Result) -> None:
    """Raises AssertionError unless all tensors of `result` equal those of `reference` bit for bit."""
    _compare(result.named(), reference.named(), torch.equal, "bit for bit")


def check_close(result: Result, reference: Result, tolerance: float = EAGER_TOLERANCE) -> None:
    """Raises AssertionError unless all tensors agree within `tolerance` of their largest element."""

    def close(a: Tensor, b: Tensor) -> bool:
        if a.shape != b.shape or not a.is_floating_point():
            return torch.equal(a, b)
        limit = tolerance * float(b.abs().max()) + EAGER_FLOOR
        return bool(((a - b).abs() <= limit).all())  # all(): NaN must not pass

    _compare(result.named(states=False), reference.named(states=False), close, f"within {tolerance}")


def _compare(ours: dict[str, Tensor], theirs: dict[str, Tensor], same: Callable[[Tensor, Tensor], bool], how: str) -> None:
    require(bool(theirs), "the reference recorded nothing to compare")
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
