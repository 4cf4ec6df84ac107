"""The hooks on optimizer steps, which bring the steps and states of `torch.optim` optimizers under the budget.

Optimizers stay as they are: PyTorch's global step hooks are enough. The pre-hook updates the parameters subgroup by subgroup, by
the undecorated `step` of a twin that has only these parameters (`teraio.optimizer.subgroup_steps`). It leaves `param_groups`
empty for the original call, so that schedulers, states and hooks see one ordinary step. The post-hook gives the groups back.
An optimizer that cannot be cut runs as a whole: all blocks that it touches are brought in first.
If the step has a closure, all of this waits until the optimizer has called it: the pre-hook puts another closure in its place.

[Note: What no graph has]
torch.compile leaves out what it cannot compile, and says nothing: all of a model with an LSTM, a module of torch.nn whose own
`compile` was called, the loop that a graph break is in. The backend is not even called then. The second step of an optimizer is
the first moment at which it shows: its parameters are in no graph. The log tells that once.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from planner.errors import BudgetError
from runtime.device import Mark
from runtime.execution import StageRun
from runtime.paging import Pager
from runtime.system import annotate, forget_undo, undo_if_interrupted, uninterrupted
from teraio.distributed import LibraryCalls, ShardedParameters, broadcast_in_stages, optimizer_inside, refuse_overlapping
from teraio.following import IterationObserver
from teraio.optimizer.arithmetic import refuse_with_masters
from teraio.optimizer.facts import OptimizerFacts, OwnHooks, StepArguments, after_closure, closure_of, moves, owned_parameters
from teraio.optimizer.host import HostRates
from teraio.optimizer.managed import ManagedOptimizer, ManagedOptimizers
from teraio.optimizer.overlapped_steps import OverlappedSteps
from teraio.optimizer.subgroup_steps import SubgroupSteps
from teraio.optimizer.subgroups import ParameterSubgroup, SubgroupSizes

logger = logging.getLogger("teraio")


# Marks optimizers whose parameters no other rank updates: those inside a `ZeroRedundancyOptimizer`.
_UPDATED_HERE = OwnHooks()
_UPDATED_HERE.updates_alone = True


class OptimizerSteps(OwnHooks):
    """Hooks every optimizer of the process that updates managed parameters. Call `close` to remove the hooks.

    calls: of parallel libraries; steps run under the same pager while these are managed. step_done: called with the optimizer
    after each step of it, when all bookkeeping is finished. automatic: manage every optimizer; if False, only those given to
    `manage`. ensure_room, rates: see `SubgroupSteps`. sizes: chooses how large subgroups are. overlap: update parameters inside
    the backward pass where possible; the attribute `overlap` is then the interface of that option for compiled graphs, else None.
    sharded: shards of the parameters that the graphs take. buckets_due: whether there may be buckets of gradients that are not
    counted yet.
    """

    def __init__(
        self,
        calls: LibraryCalls,
        *,
        step_done: Callable[[Optimizer], None],
        automatic: bool = True,
        ensure_room: Callable[[int], None] | None = None,
        rates: HostRates | None = None,
        sizes: SubgroupSizes | None = None,
        overlap: bool = False,
    ) -> None:
        pager, observer = calls.pager, calls.observer
        self._calls, self._active = calls, calls.active
        self._step_done = step_done
        self._automatic = automatic
        self.sharded = ShardedParameters(calls)
        self._optimizers = ManagedOptimizers(pager, observer, sizes or SubgroupSizes(), self.sharded, on_host=rates is not None)
        self._subgroups = SubgroupSteps(pager, observer, rates=rates, ensure_room=ensure_room)
        self._whole = _WholeSteps(pager, observer)
        self.overlap = OverlappedSteps(self._optimizers) if overlap else None
        self._reads_where_it_waits = not pager.device.asynchronous  # so a step can do without having its states brought in
        self.buckets_due = True
        self._marks: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()
        self._said: set[str] = set()
        self._handles = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]

    def close(self) -> None:
        """Remove the hooks. Waits until no update runs any more."""
        self._whole.give_up()
        self._subgroups.host.close()
        loads = [managed.load_hook for managed in self._optimizers if managed.load_hook is not None]
        for handle in (*self._handles, *self._marks.values(), *loads):
            handle.remove()

    def manage(self, optimizer: Optimizer) -> None:
        """Manage this optimizer, whatever `automatic` says. Its states become blocks as soon as one of its parameters is one.

        Waits while states are copied.
        """
        with uninterrupted():
            managed = self._optimizers.of(optimizer_inside(optimizer) or optimizer)
            managed.chosen = managed.adoption_due = True
            self.between_regions()

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers of which a parameter is a block."""
        return [managed.facts.optimizer for managed in self._optimizers if managed.has_blocks]

    def expect(self, optimizers: Sequence[Optimizer]) -> None:
        """Make blocks of their states as soon as a parameter of theirs is one, if every optimizer is managed."""
        for optimizer in optimizers if self._automatic else ():
            self._optimizers.of(optimizer).adoption_due = True

    def between_regions(self) -> None:
        """Catch up with user code: a step that failed, states that it has given or loaded. May wait while states are copied."""
        self._whole.give_up()
        self.count_buckets()
        for managed in self._optimizers:
            if managed.adoption_due and self._active() and managed.has_blocks:
                managed.adopt(self._loaded)

    def count_buckets(self) -> None:
        """Count the buckets of gradients against the budget, if there may be some that are not counted yet."""
        if self.buckets_due:
            self.buckets_due = False
            self._optimizers.buckets.look()
            self._optimizers.count_small_states()

    def _loaded(self, optimizer: Optimizer) -> None:
        with uninterrupted():  # at once, not when the next step finds them
            self._optimizers.of(optimizer).adoption_due = True
            self.between_regions()

    # -- around a step

    # Where the program compiles the step, Dynamo sees none of the hooks, nor what they call.
    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        refuse_overlapping(optimizer)
        inside = optimizer_inside(optimizer)
        if inside is not None:  # its step is the one that counts
            if inside not in self._marks:
                self._marks[inside] = inside.register_step_pre_hook(_UPDATED_HERE.there)
            broadcast_in_stages(self._calls, optimizer)
            return None
        managed = self._optimizers.of(optimizer)
        with uninterrupted():
            managed.step_ended()  # if the step before failed
        if managed.facts.closure_first:
            return after_closure(args, kwargs, lambda: self.begin(optimizer, args, kwargs))
        self.begin(optimizer, args, kwargs)
        return None

    def begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a step by subgroups, or bring in what it touches. Its gradients are there: a closure has been called."""
        with uninterrupted():
            managed = self._optimizers.of(optimizer)
            facts = managed.renew()
            self.between_regions()
            active = self._active()
            included = self._automatic or managed.chosen
            reason = facts.reason_to_stay_whole(args, kwargs)
            done = self.overlap.step_begins(managed, reason, included=included) if self.overlap is not None else frozenset()
            if not included or not active or not managed.has_blocks:
                return
            if reason is not None:
                if facts.keeps_masters:
                    refuse_with_masters(facts, reason)
                if (message := f"{facts.name} is updated as a whole: {reason}") not in self._said:
                    self._said.add(message)
                    logger.info("%s", message)
                if closure_of(args, kwargs) is not None and not facts.closure_first:  # its passes need the memory
                    return
            if managed.load_hook is None:
                managed.adopt(self._loaded)
            if reason is None:
                undo_if_interrupted(managed.step_ended)  # also if PyTorch's own call, or the way to it, is interrupted
                self._subgroups.run(managed, done=done)
            else:
                self._whole.begin(managed, reason)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if optimizer_inside(optimizer) is not None:
            return
        managed = self._optimizers.of(optimizer)
        with uninterrupted():
            cut = managed.step_ended()
            forget_undo(managed.step_ended)
            whole = self._whole.end(managed)
            if managed.had_blocks or managed.has_blocks:
                if not (cut or whole) and (self._automatic or managed.chosen) and self._active() and self._reads_where_it_waits:
                    managed.adopt(self._loaded)  # the states that the step may have made
                managed.count_states()
                self._step_done(optimizer)


_WHOLE = "optimizer/whole"


class _WholeSteps:
    """Steps that cannot be cut. Holds the blocks of one step at a time between the step's hooks.

    Where they do not fit, the step reads and writes what is not on the device through its mapping into the lower tiers, which is
    slower. On a GPU it is refused, since blocks on a drive have no such mapping.
    """

    def __init__(self, pager: Pager, observer: IterationObserver) -> None:
        self._pager = pager
        self._observer = observer
        # Whose step runs, what is held for it, since when it runs, and what names it for profilers.
        self._running: tuple[ManagedOptimizer, ParameterSubgroup, Mark, AbstractContextManager[object]] | None = None

    def begin(self, managed: ManagedOptimizer, reason: str) -> None:
        """Bring in all that the step will touch, if it fits. Waits for it.

        reason: why the step is not cut. Raises BudgetError on a GPU where it does not fit.
        """
        step = managed.pending_step()
        subgroup = managed.subgroups.one(step, range(len(step.updates)))
        needed, _ = managed.subgroups.smallest_budget([subgroup])
        budget = self._pager.account.budget_bytes
        with self._pager.region():
            if budget is not None and needed > budget:
                if self._pager.device.asynchronous:
                    what = f"optimizer/{managed.facts.name}, which is updated as a whole because {reason},"
                    raise BudgetError(smallest_bytes=needed, budget_bytes=budget, stage=what)
                return
            self._observer.region_begins(managed.identity, 1)
            fetch = self._observer.stage_reached()
            self._pager.acquire(subgroup.read, subgroup.workspace_bytes, _WHOLE, then_fetch=fetch)
        annotation, begin = annotate("update", _WHOLE), self._observer.mark()
        self._running = managed, subgroup, begin, annotation
        annotation.__enter__()

    def end(self, managed: ManagedOptimizer) -> bool:
        """Record the step that is done, and let go of its blocks. Return whether it was that of `managed`.

        Waits until no state of it is being copied.
        """
        if self._running is None or self._running[0] is not managed:
            return False
        (_, subgroup, begin, annotation), self._running = self._running, None
        end = self._observer.mark()
        annotation.__exit__(None, None, None)
        with self._pager.device.region():
            try:
                made = managed.made_states(owned_parameters(managed.facts.optimizer), subgroup.read)
            finally:
                self._pager.retire(subgroup.read, subgroup.read, last_used=subgroup.states)
            self._observer.stage_ended(
                StageRun(
                    name=_WHOLE,
                    phase="optimizer",
                    workspace_bytes=subgroup.temporary_bytes,
                    elements=subgroup.elements,
                    read=[block for block in subgroup.read if not block.dead],  # an update may replace states by new tensors
                    made=made,
                    written=[block for block in subgroup.written if not block.dead],
                ),
                begin,
                end,
            )
            self._observer.region_ended()
            self._pager.leave_region()
        return True

    def give_up(self) -> None:
        """Let go of the blocks: the step has failed, or runs compiled regions of its own. Never waits."""
        running, self._running = self._running, None
        if running is not None:
            _, subgroup, _, annotation = running
            annotation.__exit__(None, None, None)
            self._pager.retire(subgroup.read, subgroup.read)
            self._observer.region_ended()


# -- the steps of the whole process, before there is a training run and beside all runs

_REASONS = 3  # reasons of graph breaks that a message names


class Run(Protocol):
    """What a training run does with steps, see `TrainingRun`."""

    steps: OptimizerSteps

    @property
    def is_limited(self) -> bool: ...
    def has_in_graph(self, parameter: Tensor) -> bool: ...


class ProcessSteps(OwnHooks):
    """Hooks all optimizer steps of the process. runs: returns the training runs that there are now.

    in_main_memory: returns what stands for a tensor that is away from a GPU, for whoever saves the state of an optimizer.
    """

    def __init__(self, runs: Callable[[], Sequence[Run]], in_main_memory: Callable[[Tensor], Tensor]) -> None:
        self._runs = runs
        self._in_main_memory = in_main_memory
        self._steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._had_runs = False
        register_optimizer_step_pre_hook(self._before)

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
                    run.steps.begin(optimizer, args, kwargs)

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
        if not runs and not self._had_runs and "teraio.backend" in sys.modules:  # torch.compile has called it
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
