"""What teraio does around the optimizer steps of the whole process, before there is a training run and beside all runs.

[Note: What no graph has]
torch.compile leaves out what it cannot compile, and says nothing: all of a model with an LSTM, a module of torch.nn whose own
`compile` was called, the loop that a graph break is in. The backend is not even called then. The second step of an optimizer is
the first moment at which it shows: its parameters are in no graph. The log tells that once.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from teraio.optimizer.facts import OptimizerFacts, OwnHooks, StepArguments, after_closure, closure_of, moves, owned_parameters

logger = logging.getLogger("teraio")

_REASONS = 3  # reasons of graph breaks that a message names


class Run(Protocol):
    """What a training run does with steps."""

    @property
    def is_limited(self) -> bool:
        """Whether it has a budget."""

    def has_in_graph(self, parameter: Tensor) -> bool:
        """Whether a graph that has run under it has this parameter."""

    def step_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The step's gradients are there. args, kwargs: of the step."""


class ProcessSteps(OwnHooks):
    """Hooks all optimizer steps of the process. runs: returns the training runs that there are now.

    in_main_memory: returns what stands for a tensor that is away from a GPU, for whoever saves the state of an optimizer.
    wanted: returns whether torch.compile was called with teraio as its backend.
    """

    def __init__(
        self,
        runs: Callable[[], Sequence[Run]],
        *,
        in_main_memory: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        wanted: Callable[[], bool] = lambda: "teraio.backend" in sys.modules,
    ) -> None:
        self._runs = runs
        self._in_main_memory = in_main_memory
        self._wanted = wanted
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._had_runs = False
        self._handles = [register_optimizer_step_pre_hook(self._before)]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        before = self._runs()
        self._had_runs = self._had_runs or bool(before)
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if self._steps[optimizer] == 1:
            optimizer.register_state_dict_post_hook(self._saved)
        if self._steps[optimizer] == 2:
            self._look_for_parameters(optimizer, before)
        if closure_of(args, kwargs) is None or not OptimizerFacts.of(optimizer).closure_first:
            return None

        # The model may be compiled in the step's closure: a run that is made there has no hook on this step yet.
        def tell_new_runs() -> None:
            for run in self._runs():
                if run not in before:
                    run.step_begins(optimizer, args, kwargs)

        return after_closure(args, kwargs, tell_new_runs)

    def _saved(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Return what `state_dict` is to return in place of the optimizer's own dictionaries; None: just these."""
        found, replaced = dict(state_dict["state"]), False
        for key, state in found.items():
            if isinstance(state, dict):
                found[key] = shown = {n: self._in_main_memory(v) if type(v) is Tensor else v for n, v in state.items()}
                replaced |= any(shown[name] is not value for name, value in state.items())
        return {**state_dict, "state": found} if replaced else None

    def _look_for_parameters(self, optimizer: Optimizer, runs: Sequence[Run]) -> None:
        """See [Note: What no graph has]."""
        found = [owned.tensor for owned in owned_parameters(optimizer) if type(owned.tensor) in (Tensor, Parameter)]
        trained = [parameter for parameter in found if parameter.requires_grad and parameter.device.type != "meta"]
        total = sum(parameter.nbytes for parameter in trained)
        if not moves(total):
            return
        name = type(optimizer).__name__
        if not runs and not self._had_runs and self._wanted():
            self._had_runs = True  # say it once
            logger.warning(
                "%s steps, but torch.compile has not given teraio any graph: this training is not managed%s. Set "
                "TORCH_LOGS=graph_breaks to see what was not compiled. Compile a module of a class of your own; the "
                "compile() method of a module of torch.nn compiles nothing",
                name,
                graph_break_reasons(),
            )
        outside = [parameter for parameter in trained if not any(run.has_in_graph(parameter) for run in runs)]
        outside_bytes = sum(parameter.nbytes for parameter in outside)
        if any(run.is_limited for run in runs) and 2 * outside_bytes > total:
            logger.warning(
                "%s updates %s bytes of parameters, and %s of them are in no graph that teraio has compiled: they do not move, "
                "nor does what is computed from them%s. Set TORCH_LOGS=graph_breaks to see what was not compiled",
                name,
                f"{total:,}",
                f"{outside_bytes:,}",
                graph_break_reasons(),
            )


def graph_break_reasons() -> str:
    """Return why Dynamo did not compile code, in brackets; "" if it has not said so."""
    counted = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    texts = [*counted.get("graph_break", ()), *counted.get("unimplemented", ())]
    reasons = list(dict.fromkeys(text.splitlines()[0] for text in texts if text))[:_REASONS]
    return f" (graph breaks: {'; '.join(reasons)})" if reasons else ""
