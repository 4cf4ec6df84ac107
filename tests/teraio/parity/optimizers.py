"""Kinds of optimizers, and small trainings of which their states are the larger part."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .harness import Case, one_update
from .models import HIDDEN, WIDTH

Make = Callable[[list[nn.Parameter]], Optimizer]


class Layers(nn.Module):
    """Residual layers with two weights, by default of 1 MiB each: features [rows, 64] to [rows, 64].

    `unused` gets no gradient. tied: all layers have the first one's `up`. frozen: the last one learns nothing.
    broken: a graph break after the first one.
    """

    def __init__(
        self, layers: int, hidden: int = HIDDEN, *, tied: bool = False, frozen: bool = False, broken: bool = False
    ) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, hidden) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(hidden, WIDTH) for _ in range(layers))
        self.unused = nn.Parameter(torch.ones(WIDTH, hidden))
        self.broken = broken
        for up in self.up if tied else ():
            up.weight = self.up[0].weight
        if frozen:
            self.up[-1].requires_grad_(False)
            self.down[-1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self._run(x, 0, 1)
        if self.broken:
            torch._dynamo.graph_break()
        return self._run(x, 1, len(self.up))

    def _run(self, x: Tensor, begin: int, end: int) -> Tensor:
        for layer in range(begin, end):
            x = x + self.down[layer](torch.tanh(self.up[layer](x)))
        return x


def few_rows(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, WIDTH, generator=generator) for _ in range(steps)]


def mirrored(model: nn.Module, x: Tensor) -> Tensor:
    """How far the output is from the batch in reverse order."""
    loss: Tensor = (model(x) - x.flip(0)).square().mean()
    return loss


def small(
    make_optimizer: str | Callable[[nn.Module], Optimizer | list[Optimizer]],
    *,
    layers: int = 2,
    model: Callable[[int], nn.Module] = Layers,
    **settings: Any,
) -> Case:
    """A case that trains `model(layers)`, for 12 steps unless told otherwise. make_optimizer: or the name of a kind."""
    usual = {"make_batches": few_rows, "compute_loss": mirrored, "step": one_update, "steps": 12}
    make = _one(make_optimizer) if isinstance(make_optimizer, str) else make_optimizer
    return Case(make_model=_made(model, layers), make_optimizer=make, **usual | settings)


@functools.cache
def _made(model: Callable[[int], nn.Module], layers: int) -> Callable[[], nn.Module]:
    return lambda: model(layers)


@functools.cache
def _one(kind: str) -> Callable[[nn.Module], Optimizer]:
    """Equal for equal kinds, so that references are trained once."""
    return lambda module: KINDS[kind](list(module.parameters()))


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
