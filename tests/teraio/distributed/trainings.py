"""Trainings that each rank runs: with teraio under a budget, and without teraio. What a rank finds goes back to the test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import teraio
from runtime.paging import holder_of

from ...training import MIB, PLAN_SECONDS, blocks, forget, known_blocks, require

ROWS, WIDTH, WIDE = 8, 512, 1024
STEPS = 10
"""Enough to compile (1), profile (1), hear of other ranks (3), and follow their plan (2)."""


class Block(nn.Module):
    """[rows, width] to the same, through two weights of 2 MiB each: the half of one is still large enough to move."""

    def __init__(self, wide: int = WIDE) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, wide), nn.Linear(wide, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks one after the other. unused: with a weight that no forward pass uses. wide: of what is inside of the blocks."""

    def __init__(self, count: int = 2, *, unused: bool = False, wide: int = WIDE) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(wide) for _ in range(count))
        if unused:
            self.unused = nn.Linear(WIDTH, WIDE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@dataclass(slots=True, kw_only=True)
class Found:
    """What one rank has found. values: losses, norms and full parameters, by name.

    phase, waiting_for, peak, moved: of teraio's status at the end. movable: by kind, whether the block of each large parameter or
    gradient can move, after the last step. states: names of the optimizer states that can move.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    phase: str = ""
    waiting_for: str | None = None
    peak: int = 0
    moved: dict[str, int] = field(default_factory=dict)
    movable: dict[str, list[bool]] = field(default_factory=dict)
    states: set[str] = field(default_factory=set)


Made = tuple[Callable[[Tensor], Tensor], nn.Module, Optimizer]


def train(
    make: Callable[[Callable[[Any], Any]], Made],
    options: Mapping[str, Any] | None,
    *,
    steps: int = STEPS,
    passes: int = 1,
    clip: bool = False,
    rows: int = ROWS,
    same_rows: bool = False,
    no_sync: Callable[[Any], AbstractContextManager[Any]] | None = None,
) -> Found:
    """Train what `make` makes from a function that compiles, or does not if `options` is None."""
    forget()
    torch.manual_seed(0)
    given = {"codegen": "eager", "profile_iterations": 1, **(options or {})}

    def prepare(what: Any) -> Any:
        return torch.compile(what, backend="teraio", options=given) if options is not None else what

    model, module, optimizer = make(prepare)
    random = torch.Generator().manual_seed(1 if same_rows else 1 + dist.get_rank())
    found = Found()
    for step in range(steps):
        for number in range(passes):
            last = number == passes - 1
            with no_sync(model) if no_sync is not None and not last else nullcontext():
                loss = model(torch.randn(rows, WIDTH, generator=random)).square().mean()
                loss.backward()
            found.values[f"loss {step}.{number}"] = loss.detach().clone()
        if clip:
            norm = nn.utils.clip_grad_norm_(module.parameters(), 0.05)
            found.values[f"norm {step}"] = full(norm).clone()
        optimizer.step()
        if step == steps - 1:
            _note_blocks(found, module, optimizer)
        optimizer.zero_grad()
        if options is not None:
            require(teraio.wait_for_plan(PLAN_SECONDS), "no plan")
    if options is not None:
        note_status(found)
    found.values |= {f"parameter {name}": full(value).detach().clone() for name, value in module.named_parameters()}
    teraio.reset()
    return found


def full(value: Tensor) -> Tensor:
    """The whole tensor, of all ranks."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def note_status(found: Found) -> None:
    (status,) = teraio.status()
    found.phase, found.waiting_for, found.peak = status.phase, status.waiting_for, status.device_peak_bytes
    found.moved = dict(status.moved_bytes)


def _note_blocks(found: Found, module: nn.Module, optimizer: Optimizer) -> None:
    parameters = list(module.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    for kind, tensors in (("parameter", parameters), ("gradient", gradients)):
        large = [each for each in tensors if holder_of(each).nbytes >= MIB]
        found.movable[kind] = [block.span is not None for block in known_blocks(large)]
    found.states = {block.name for block in blocks() if block.kind == "optimizer_state" and block.span is not None}


def check_planned(one: Found, other: Found, unlimited: Found, *, budget: int, tolerance: float = 1e-4) -> None:
    """A rank kept to a plan and the budget, has the bits of a run without a budget, and is near one without teraio."""
    assert not differences(one, unlimited)
    assert max(differences(one, other).values(), default=0.0) < tolerance
    assert one.phase == "planned", one.waiting_for
    assert one.peak <= budget, f"{one.peak:,} of {budget:,} bytes"
    assert one.moved["storage->device"] > 0


def differences(found: Found, expected: Found) -> dict[str, float]:
    """The largest difference of each value, as a share of the largest expected one; equal values are left out."""
    require(found.values.keys() == expected.values.keys(), f"{found.values.keys() ^ expected.values.keys()}")
    pairs = {name: (found.values[name], value) for name, value in expected.values.items()}
    return {
        name: ((one - other).abs().max() / other.abs().max().clamp_min(1e-8)).item()
        for name, (one, other) in pairs.items()
        if not torch.equal(one, other)
    }
