"""Finds where iterations end."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Hashable

from torch.optim import Optimizer

from teraio.profiling.iteration import Iteration

logger = logging.getLogger("teraio")

LONGEST_PERIOD = 16  # iterations of so many kinds may take turns
_TO_BE_SURE = 4  # so many iterations beyond two periods have to be as those before them


class IterationBorder:
    """Knows what ends iterations. Keeps no optimizer alive.

    [Note: Where iterations end]
    * With `teraio.step_done()`, once the user has called it.
    * Else with the step of the first optimizer seen. Steps of others are part of the iteration. Another optimizer takes over if
      the first one is gone, or no longer used.
    * Where no optimizer steps: where the forward graph begins again that came first, after a backward graph has run. That may as
      well be the next pass before one update, so some passes have to go by first: few if no gradient of a pass is left when
      the next one begins, many if gradients are.
    * Where nothing but inference has run: where the graph begins again that came first. Many passes have to go by first, since a
      training may begin with an evaluation.

    period: so many of these ends make one. In some loops, iterations of several kinds take turns: PPO updates several times by
    one rollout, a task of meta-learning has several steps. `Repetition` finds the period.
    """

    # Steps of another optimizer without one of the first, after which this counts as no longer used; other graphs, likewise.
    _PATIENCE = 4
    _PASSES = 4
    _PASSES_THAT_LEAVE_GRADIENTS = 32

    def __init__(self) -> None:
        self._first: weakref.ref[Optimizer] | None = None
        self._others: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # steps since one of the first
        self._told = False
        self._graph: Hashable | None = None
        self._other_graphs = 0
        self._went_back = False
        self._passes = 0
        self._passes_without_gradients = 0
        self._trains = False
        self._ends = 0
        self.period = 1

    @property
    def waiting_for(self) -> str | None:
        """What has to happen before it is known where iterations end; None if it is known."""
        if self._told or self._first is not None or self._knows_passes:
            return None
        return (
            f"the end of an iteration: the step of a torch.optim optimizer over parameters of the compiled model, or "
            f"teraio.step_done() after your own update ({self._passes} passes so far)"
        )

    def tell(self) -> bool:
        """The user says where iterations end, from now on. Return whether one ends here."""
        self._told = True
        return self._period_ends()

    def _period_ends(self) -> bool:
        self._ends = (self._ends + 1) % self.period
        return not self._ends

    # -- steps of optimizers

    def ends_with(self, optimizer: Optimizer) -> bool:
        """Return whether the step that `optimizer` has just done ends an iteration."""
        if self._told:
            return False
        first = self._first() if self._first is not None else None
        if first is None or (first is not optimizer and self._no_longer_used(first, optimizer)):
            first = optimizer
            self._first = weakref.ref(optimizer)
        if first is optimizer:
            self._others.clear()
            return self._period_ends()
        self._others[optimizer] = self._others.get(optimizer, 0) + 1
        return False

    def _no_longer_used(self, first: Optimizer, other: Optimizer) -> bool:
        """Two that alternate over the same parameters are both in use. One that steps twice in a row has replaced the other."""
        own = {id(parameter) for group in first.param_groups for parameter in group["params"]}
        shared = any(id(parameter) in own for group in other.param_groups for parameter in group["params"])
        return self._others.get(other, 0) >= (1 if shared else self._PATIENCE + 1)

    # -- passes

    @property
    def _knows_passes(self) -> bool:
        return self._passes_without_gradients >= self._PASSES or self._passes >= self._PASSES_THAT_LEAVE_GRADIENTS

    def backward_begins(self) -> None:
        """A backward graph is about to run."""
        self._went_back = True

    def ends_before(self, graph: Hashable, *, inference: bool = False, gradients_left: Callable[[], bool]) -> bool:
        """Return whether an iteration ends before the run of a forward graph that is about to begin. Not for one inside backward.

        inference: no backward graph will follow. gradients_left: returns whether a gradient of the iteration is still there.
        """
        if self._told or self._first is not None or (inference and self._trains):
            return False
        if not inference and not self._trains:
            self._trains, self._graph, self._passes = True, None, 0
        if not (inference or self._went_back or self._graph is None):
            return False
        self._went_back = False
        if graph != self._graph:
            self._other_graphs += 1
            if self._graph is None or self._other_graphs > self._PATIENCE:
                self._graph, self._other_graphs = graph, 0
            return False
        self._other_graphs = 0
        self._passes += 1
        self._passes_without_gradients += not inference and not gradients_left()
        return self._knows_passes and self._period_ends()


class Repetition:
    """Lets several iterations count as one if they repeat after so many, and no longer if these do not repeat."""

    def __init__(self, border: IterationBorder) -> None:
        self._border = border
        self._latest: deque[Hashable] = deque(maxlen=2 * LONGEST_PERIOD + _TO_BE_SURE)  # signatures
        self._shortest, self._longest = 2, LONGEST_PERIOD
        border.period = 1

    def look(self, iteration: Iteration, *, compiled: bool, repeats: bool) -> str | None:
        """Take in an iteration. Return why it cannot be used if a period was found with it.

        compiled: a graph was compiled in it. repeats: nothing shows that it ran other graphs than the one before.
        """
        border, latest = self._border, self._latest
        if border.period > 1:
            if iteration.truncated:
                self._longest = border.period - 1
            if iteration.truncated or not repeats:
                self._shortest = border.period + 1 if border.period < self._longest else 2
                border.period = 1
            return None
        if compiled or not iteration.complete:
            latest.clear()
            return None
        latest.append(iteration.signature)
        found = list(latest)
        for period in range(self._shortest, self._longest + 1):
            same = period + _TO_BE_SURE
            if found[-same:] == found[-same - period : -period] and len(set(found[-period:])) > 1:
                logger.info("iterations repeat after %d: from now on, so many count as one", period)
                border.period = period
                latest.clear()
                return f"iterations repeat after {period}, and so many count as one from now on"
        return None
