"""What the watch on parameters notes down, see [Note: When a gradient is final]."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runtime.execution import Program
from runtime.paging import Block

STEPS_TO_WATCH = 2

Settings = list[dict[str, Any]]

Shown = tuple[Block | None, torch.Size, tuple[int, ...], int | torch.SymInt, torch.dtype]
"""Which part of a storage a tensor shows, and how; holds no tensor: `.grad` takes over only what nobody else holds."""

Digest = tuple[int, tuple[Tensor, ...]]
"""A tensor's version, and small ones that differ if its content does, as raw bytes: NaN is equal to itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Final:
    """A gradient of a backward graph: its slot, and the stage after which nothing needs it or the parameter any more."""

    slot: int
    after: int


@dataclass(slots=True, kw_only=True, eq=False)
class WatchedRun:
    """A run of a graph, as a `InterleavedStages` saw it.

    layout: where to note what is learnt. members: who takes part, until the run has ended. last_read: the number of the last
    stage that read a block. results: by position, which tensor user code gets hold of; digests: of the content, by slot.
    settings: of the optimizers, by their id, when it had ended.
    """

    number: int
    program: Program
    layout: dict[int, Final]
    members: list[tuple[Tensor, UpdateEligibility]]
    last_read: dict[Block, int] = field(default_factory=dict)
    results: list[Shown | None] = field(default_factory=list)
    digests: dict[int, Digest] = field(default_factory=dict)
    settings: dict[int, Settings] = field(default_factory=dict)

    @property
    def result_slots(self) -> set[int]:
        return {result for result in self.program.results if isinstance(result, int)}


@dataclass(slots=True, kw_only=True)
class UpdateEligibility:
    """What is known of a parameter. place: its group and its number among all parameters of the optimizer.

    forwards, passes: graphs that used it, and that handed it a gradient, since the last step; `run` is the last of these
    that was watched, over `edge`. updated: inside a backward pass since the last step.
    """

    optimizer: weakref.ref[Optimizer]
    place: tuple[int, int]
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
        return self.good_steps >= STEPS_TO_WATCH and not self.refused

    def forget_passes(self) -> None:
        self.updated, self.forwards, self.passes = False, 0, 0
        self.run = self.block = self.problem = None


def places(optimizer: Optimizer) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Each parameter with its group and its number among all."""
    numbered = ((index, p) for index, group in enumerate(optimizer.param_groups) for p in group["params"])
    for number, (index, parameter) in enumerate(numbered):
        yield (index, number), parameter


def settings_of(optimizer: Optimizer) -> Settings:
    """All but the parameters, to be compared with later ones."""
    return [
        {n: (id(v), v._version) if isinstance(v, Tensor) else v for n, v in group.items() if n != "params"}
        for group in optimizer.param_groups
    ]


def digest(tensor: Tensor) -> Digest:
    """Of a tensor whose memory is on the device. Does not wait for the device."""
    values = (torch.linalg.vector_norm(tensor), tensor.sum())
    return tensor._version, tuple(value.reshape(1).view(torch.uint8) for value in values)


def equal(first: Digest, second: Digest) -> bool:
    """Blocks until the device has computed both."""
    return first[0] == second[0] and all(map(torch.equal, first[1], second[1]))


def last_use(run: WatchedRun, slot: int, parameter: Block) -> int:
    """The last stage that makes or reads what is in `slot`, or reads the parameter's block."""
    uses = [number for number, stage in enumerate(run.program.stages) if slot in (*stage.inputs, *stage.outputs)]
    return max((*uses, run.last_read.get(parameter, -1)))
