"""What is recorded about parameters to decide where they are updated, see [Note: When a gradient is final]."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runtime.execution import Program
from runtime.paging import Block

STEPS_TO_WATCH = 2

Settings = list[dict[str, Any]]

TensorView = tuple[Block | None, torch.Size, tuple[int, ...], int | torch.SymInt, torch.dtype]
"""Which memory a tensor shows, and how. Holds no tensor, since `.grad` takes over only a tensor that nobody else holds."""

Digest = tuple[int, tuple[Tensor, ...]]
"""A tensor's version, and small tensors that change with its content. They are raw bytes, so that NaN is equal to itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalGradient:
    """A gradient of a backward graph: its slot, and the stage after which nothing needs the gradient or the parameter."""

    slot: int
    after: int


@dataclass(slots=True, kw_only=True, eq=False)
class WatchedRun:
    """One run of a graph that is watched.

    layout: where to record final gradients. members: the parameters that take part, until the run has ended. last_read: the
    number of the last stage that read a block. results: what the graph returns to user code, by position. digests: of the content
    of results, by slot. settings: of the optimizers, by their id, at the end of the run.
    """

    number: int
    program: Program
    layout: dict[int, FinalGradient]
    members: list[tuple[Tensor, UpdateEligibility]]
    last_read: dict[Block, int] = field(default_factory=dict)
    results: list[TensorView | None] = field(default_factory=list)
    digests: dict[int, Digest] = field(default_factory=dict)
    settings: dict[int, Settings] = field(default_factory=dict)

    @property
    def result_slots(self) -> set[int]:
        """The slots that the graph returns."""
        return {result for result in self.program.results if isinstance(result, int)}


@dataclass(slots=True, kw_only=True)
class UpdateEligibility:
    """Whether a parameter may be updated inside the backward pass, and what was seen of it.

    group, number: of the optimizer's group, and among all its parameters. good_steps: in a row. refused: for good.
    updated: inside a backward pass since the last step.
    forwards, passes: graphs that used the parameter, and that gave it a gradient, since the last step. run: the last watched run
    that gave it a gradient. edge: over which it did so. problem: why that gradient may not be final.
    """

    optimizer: weakref.ref[Optimizer]
    group: int
    number: int
    good_steps: int = 0
    refused: bool = False
    updated: bool = False
    forwards: int = 0
    passes: int = 0
    run: WatchedRun | None = None
    edge: int = -1
    block: Block | None = None
    problem: str | None = None

    @property
    def qualified(self) -> bool:
        """Whether the parameter may be updated inside the backward pass."""
        return self.good_steps >= STEPS_TO_WATCH and not self.refused

    def forget_passes(self) -> None:
        """Forget what was seen since the last step."""
        self.updated, self.forwards, self.passes = False, 0, 0
        self.run = self.block = self.problem = None


def settings_of(optimizer: Optimizer) -> Settings:
    """Return the settings of all groups, to be compared with later ones."""
    return [
        {n: (id(v), v._version) if isinstance(v, Tensor) else v for n, v in group.items() if n != "params"}
        for group in optimizer.param_groups
    ]


def digest(tensor: Tensor) -> Digest:
    """Return the digest of a tensor whose memory is on the device. Does not wait for the device."""
    values = (torch.linalg.vector_norm(tensor), tensor.sum())
    return tensor._version, tuple(value.reshape(1).view(torch.uint8) for value in values)


def equal(first: Digest, second: Digest) -> bool:
    """Return whether two digests are the same. Waits until the device has computed both."""
    return first[0] == second[0] and all(map(torch.equal, first[1], second[1]))


def last_use(run: WatchedRun, slot: int, parameter: Block) -> int:
    """Return the last stage that makes or reads what is in `slot`, or reads the parameter's block."""
    uses = [number for number, stage in enumerate(run.program.stages) if slot in (*stage.inputs, *stage.outputs)]
    return max((*uses, run.last_read.get(parameter, -1)))
