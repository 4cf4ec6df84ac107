"""Training small models under a budget that their optimizer states do not fit in, beside the unmanaged optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import teraio
from teraio.registry import REGISTRY
from teraio.stages import CutPolicy

from ...training import Training, begin, unequal

MIB = 1 << 20
WIDTH, HIDDEN, ROWS = 64, 4096, 8
STEPS = 12

Make = Callable[[list[nn.Parameter]], Optimizer]
Step = Callable[["Run", Tensor, int], None]


class Model(nn.Module):
    """Residual layers with two weights, by default of 1 MiB each: features [rows, 64] to [rows, 64].

    `unused` gets no gradient.
    """

    def __init__(self, layers: int, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, hidden) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(hidden, WIDTH) for _ in range(layers))
        self.unused = nn.Parameter(torch.ones(WIDTH, hidden))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.tanh(up(x)))
        return x


@dataclass(slots=True, kw_only=True)
class Run:
    """One training, as a step sees it. gradients: how many parameters had one after each backward pass.

    folder: for files of the step. options: those of the run.
    """

    training: Training
    folder: Path
    options: dict[str, Any]
    values: list[Tensor] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> nn.Module:
        return self.training.module

    @property
    def model(self) -> nn.Module:
        return self.training.model

    @property
    def optimizers(self) -> list[Optimizer]:
        return self.training.optimizers

    def backward(self, x: Tensor, scale: float = 1.0) -> None:
        loss = scale * (self.model(x) - x.flip(0)).square().mean()
        loss.backward()
        self.gradients.append(sum(p.grad is not None for p in self.module.parameters()))
        self.values.append(loss.detach().clone())


def plain(run: Run, x: Tensor, index: int) -> None:
    run.backward(x)
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad()


@functools.cache
def one(make: Make) -> Callable[[nn.Module], list[Optimizer]]:
    return lambda module: [make(list(module.parameters()))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What to train, with so many layers (given to `make_model`); `planned`: until a plan is followed."""

    make: Callable[[nn.Module], list[Optimizer]]
    step: Step = plain
    steps: int = STEPS
    layers: int = 2
    planned: bool = False
    make_model: Callable[[int], nn.Module] = Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All that is compared, and what teraio says in the end."""

    values: list[Tensor]
    gradients: list[int]
    moved_states: set[str]
    status: teraio.Status


def train(case: Case, folder: Path, options: dict[str, Any]) -> Result:
    training = begin(functools.partial(case.make_model, case.layers), case.make, options)
    run = Run(training=training, folder=folder, options=options)
    generator = torch.Generator().manual_seed(1)
    batches = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(case.steps))
    training.run(batches, lambda x, index: case.step(run, x, index), planned=case.planned)
    module = run.module
    values = [*run.values, *(p.detach() for p in module.parameters())]
    for optimizer in run.optimizers:
        values += [v for p in module.parameters() for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor)]
    values = [value.clone() for value in values]
    return Result(values=values, gradients=run.gradients, moved_states=training.states_moved, status=training.progress[-1][0])


def unmanaged(case: Case, folder: Path) -> Result:
    """The run without a budget and without managed optimizers."""
    result = train(case, folder, {"optimizer": "off"})
    assert not any(result.status.moved_bytes.values()) and not result.moved_states
    return result


def reference(case: Case, folder: Path) -> Result:
    """As `unmanaged`, but trained only once in this process for equal cases. Other steps than `plain` may use the folder."""
    if case.step is not plain:
        return unmanaged(case, folder)
    policy = REGISTRY.parts.cut_policy  # of the fixtures: other stages have another peak
    return _kept(replace(case, planned=False), policy, torch.get_num_threads())


@functools.lru_cache(maxsize=8)
def _kept(case: Case, policy: CutPolicy | None, threads: int) -> Result:
    return unmanaged(case, Path())


def budgeted(case: Case, folder: Path, budget: int) -> dict[str, Any]:
    return {"memory_budget": budget, "storage": str(folder), "profile_iterations": 2 if case.planned else 1000}


def check(case: Case, folder: Path, *, states: int, fraction: float = 0.45, **options: Any) -> Result:
    """Train without a budget, and within `fraction` of what that took at its peak. At least `states` states must leave.

    options: further ones of the run with a budget.
    """
    expected = reference(case, folder)
    budget = int(fraction * expected.status.device_peak_bytes)
    found = train(case, folder, budgeted(case, folder, budget) | options)
    assert not unequal(found.values, expected.values)
    assert 0 < found.status.device_peak_bytes <= budget
    assert len(found.moved_states) >= states, found.moved_states
    assert found.status.phase == ("planned" if case.planned else "profile")
    return found


KINDS: dict[str, Make] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.01),
    "SGD momentum": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9),
    "SGD nesterov": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": torch.optim.Adam,
    "Adam amsgrad": lambda ps: torch.optim.Adam(ps, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, foreach=True),
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3, momentum=0.9, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2], ns_steps=1),  # each takes seconds in bfloat16
}
KEEPS_NONE = {"SGD", "Adafactor"}
"""Keep no state that is large enough to move."""
