"""The parameters of an optimizer by number, what an update of each touches, and groups that show only some of them."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from runtime.paging import Block
from runtime.system import thawed


class OwnedParameter(NamedTuple):
    """A parameter of an optimizer: its number among all parameters of the optimizer, and the number of its group."""

    number: int
    group: int
    tensor: Tensor


def owned_parameters(optimizer: Optimizer) -> tuple[OwnedParameter, ...]:
    """Return all parameters that the optimizer has now, in order: the one with number n is at position n."""
    in_order = ((index, parameter) for index, group in enumerate(optimizer.param_groups) for parameter in group["params"])
    return tuple(OwnedParameter(number, index, parameter) for number, (index, parameter) in enumerate(in_order))


def optimizers_alive() -> Iterator[Optimizer]:
    """Yield all optimizers of the process. Looks through all objects of Python, which takes a while: for errors only."""
    with thawed():
        objects = gc.get_objects()
    for found in objects:
        if issubclass(type(found), Optimizer) and hasattr(found, "param_groups"):
            yield found


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterUpdate:
    """What the update of one parameter touches. Without a gradient it touches nothing, and `elements` is 0.

    total_bytes: of parameter, gradient and states, also without a gradient.
    size_bytes: of the tensor that the optimizer updates: the parameter or its master.
    master_bytes: of the master, 0 if there is none.
    fresh_bytes: of the states that this update makes first. state_bytes: of the largest tensor of the state.
    """

    total_bytes: int
    size_bytes: int = 0
    master_bytes: int = 0
    device: str = "cpu"
    dtype: torch.dtype | None = None
    elements: int = 0
    fresh_bytes: int = 0
    state_bytes: int = 0
    parameter: Block | None = None
    gradient: Block | None = None
    states: tuple[Block, ...] = ()

    @property
    def blocks(self) -> Iterator[Block]:
        """All its blocks."""
        return (b for b in (self.parameter, self.gradient, *self.states) if b is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingStep:
    """A step that is about to run. Keeps the optimizer and its parameters alive: for the length of the step only.

    updates: what the update of each parameter touches, by group.
    """

    optimizer: Optimizer
    parameters: tuple[OwnedParameter, ...]
    updates: tuple[tuple[ParameterUpdate, ...], ...]

    def owned(self, numbers: Iterable[int]) -> list[OwnedParameter]:
        """Return the parameters with these numbers."""
        return [self.parameters[number] for number in numbers]

    @property
    def in_order(self) -> tuple[ParameterUpdate, ...]:
        """The updates of all parameters, by number."""
        return tuple(update for group in self.updates for update in group)

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """`total_bytes` of all updates, by group."""
        return tuple(tuple(update.total_bytes for update in group) for group in self.updates)


_NOTHING = Parameter(torch.empty(0), requires_grad=False)


class ParameterGroups:
    """The full parameter lists of an optimizer, while its `param_groups` are narrowed to some of the parameters.

    Keeps the optimizer and its parameters alive: for the length of one step only.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._all: list[list[Any]] = [group["params"] for group in optimizer.param_groups]

    def narrow(self, chosen: Sequence[Iterable[int]]) -> None:
        """Show the optimizer only these parameters, given by their positions within each group."""
        self._set([[parameters[index] for index in indices] for parameters, indices in zip(self._all, chosen, strict=True)])

    def empty(self) -> None:
        """Show the optimizer no parameter that has a gradient.

        Not none at all: of a group without any, Dynamo finds that all are on a GPU, and makes the optimizer capturable.
        """
        self._set([[_NOTHING] for _ in self._all])

    def restore(self) -> None:
        """Show the optimizer all its parameters again, by the list objects that it had before."""
        self._set(self._all)

    def _set(self, groups: Iterable[list[Any]]) -> None:
        for group, parameters in zip(self._optimizer.param_groups, groups, strict=True):
            group["params"] = parameters
