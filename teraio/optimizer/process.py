"""What teraio does around the optimizer steps of the whole process, before there is a training run and beside all runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from teraio.optimizer.capabilities import OwnHooks, StepArguments, after_closure, calls_closure_first, closure_of


class Run(Protocol):
    """What a training run does with steps."""

    def step_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The step's gradients are there. args, kwargs: of the step."""


class ProcessSteps(OwnHooks):
    """Hooks all optimizer steps of the process. runs: returns the training runs that there are now."""

    def __init__(self, runs: Callable[[], Sequence[Run]]) -> None:
        self._runs = runs
        self._handles = [register_optimizer_step_pre_hook(self._before)]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        """The model may be compiled in the step's closure: a run that is made there has no hook on this step yet."""
        if closure_of(args, kwargs) is None or not calls_closure_first(optimizer):
            return None
        before = self._runs()

        def tell_new_runs() -> None:
            for run in self._runs():
                if run not in before:
                    run.step_begins(optimizer, args, kwargs)

        return after_closure(args, kwargs, tell_new_runs)
