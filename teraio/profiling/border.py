"""Finds where iterations end."""

from __future__ import annotations

import weakref

from torch.optim import Optimizer


class IterationBorder:
    """An iteration ends with the step of the first optimizer seen. Steps of others are part of the iteration.

    Another optimizer takes over if the first one is gone, or no longer used. Keeps no optimizer alive.
    """

    _PATIENCE = 4
    """Steps of other optimizers in a row after which the first one counts as no longer used."""

    def __init__(self) -> None:
        self._first: weakref.ref[Optimizer] | None = None
        self._others = 0

    def ends_with(self, optimizer: Optimizer) -> bool:
        """Return whether the step that `optimizer` has just done ends an iteration."""
        first = self._first() if self._first is not None else None
        if first is None or (first is not optimizer and self._no_longer_used(first, optimizer)):
            first = optimizer
            self._first = weakref.ref(optimizer)
        self._others = 0 if first is optimizer else self._others + 1
        return first is optimizer

    def _no_longer_used(self, first: Optimizer, other: Optimizer) -> bool:
        """Two that alternate over the same parameters are both in use. One that steps twice in a row has replaced the other."""
        return self._others >= (1 if _share_parameters(first, other) else self._PATIENCE + 1)


def _share_parameters(one: Optimizer, other: Optimizer) -> bool:
    own = {id(parameter) for group in one.param_groups for parameter in group["params"]}
    return any(id(parameter) in own for group in other.param_groups for parameter in group["params"])
