"""The hooks on optimizer steps, which bring the steps and states of `torch.optim` optimizers under the budget.

Optimizers stay as they are: PyTorch's global step hooks are enough. The pre-hook updates the parameters subgroup by subgroup, by
the undecorated `step` with `param_groups` narrowed to the subgroup (`teraio.optimizer.subgroup_steps`). It leaves the groups
empty for the original call, so that schedulers, states and hooks see one ordinary step. The post-hook gives the groups back.
An optimizer that cannot be cut runs as a whole, see `teraio.optimizer.whole`.
Dynamo sees none of the hooks, nor what they call, where the program compiles the step.
If the step has a closure, all of this waits until the optimizer has called it: the pre-hook puts another closure in its place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from runtime.device import MIN_MOVED_BYTES
from runtime.paging import Pager
from runtime.system import forget_undo, undo_if_interrupted, uninterrupted
from teraio.distributed import ShardedParameters, UpdateBroadcasts, optimizer_inside, refuse_overlapping
from teraio.following import IterationObserver
from teraio.optimizer.capabilities import OwnerHooks, OwnHooks, StepArguments, after_closure, calls_closure_first, closure_of
from teraio.optimizer.host_rates import HostRates
from teraio.optimizer.in_backward import OverlappedSteps
from teraio.optimizer.managed import ManagedOptimizer, ManagedOptimizers
from teraio.optimizer.master_hooks import refuse_with_masters
from teraio.optimizer.subgroup_sizes import SubgroupSizes
from teraio.optimizer.subgroup_steps import SubgroupSteps
from teraio.optimizer.whole import WholeSteps

logger = logging.getLogger("teraio")


class OptimizerSteps(OwnHooks):
    """Hooks every optimizer of the process that updates managed parameters. Call `close` to remove the hooks.

    active: returns whether steps are managed now. step_done: called with the optimizer after each step of it, when all
    bookkeeping is finished. automatic: manage every optimizer; if False, only those given to `manage`. ensure_room: called before
    an optimizer makes states, with the bytes of all states that it will have; may raise StorageFullError. rates: of updates on
    the host, None if there is no host tier. sizes: chooses how large subgroups are. min_moved_bytes: smaller tensors stay on the
    device. overlap: update parameters inside the backward pass where possible; the attribute `overlap` is then the interface of
    that option for compiled graphs, else None. sharded: shards of the parameters that the graphs take.
    broadcasts: makes stages of what `ZeroRedundancyOptimizer` sends.
    buckets_due: whether there may be buckets of gradients that are not counted yet.
    """

    def __init__(
        self,
        pager: Pager,
        recorder: IterationObserver,
        *,
        active: Callable[[], bool],
        step_done: Callable[[Optimizer], None],
        automatic: bool = True,
        ensure_room: Callable[[int], None] | None = None,
        rates: HostRates | None = None,
        sizes: SubgroupSizes | None = None,
        min_moved_bytes: int = MIN_MOVED_BYTES,
        overlap: bool = False,
        sharded: ShardedParameters | None = None,
        broadcasts: UpdateBroadcasts | None = None,
    ) -> None:
        self._active = active
        self._step_done = step_done
        self._automatic = automatic
        self._optimizers = ManagedOptimizers(
            pager,
            recorder,
            sizes or SubgroupSizes(),
            sharded=sharded,
            min_moved_bytes=min_moved_bytes,
            on_host=rates is not None,
        )
        self._subgroups = SubgroupSteps(pager, recorder, rates=rates, ensure_room=ensure_room, min_moved_bytes=min_moved_bytes)
        self._whole = WholeSteps(pager, recorder)
        self.overlap = OverlappedSteps(pager, recorder, self._optimizers) if overlap else None
        self._reads_where_it_waits = not pager.device.asynchronous  # so a step can do without having its states brought in
        self.buckets_due = True
        self._broadcasts = broadcasts
        self._owners = OwnerHooks()
        self._said: set[str] = set()
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def close(self) -> None:
        """Remove the hooks. Waits until no update runs any more."""
        self._whole.give_up()
        self._subgroups.close()
        self._owners.close()
        for handle in self._handles:
            handle.remove()
        for managed in self._optimizers:
            managed.forget_loads()

    def manage(self, optimizer: Optimizer) -> None:
        """Manage this optimizer, whatever `automatic` says. Its states become blocks as soon as one of its parameters is one."""
        managed = self._optimizers.of(optimizer_inside(optimizer) or optimizer)
        managed.chosen = managed.adoption_due = True
        self.between_regions()

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers of which a parameter is a block."""
        return [managed.optimizer for managed in self._optimizers if managed.has_blocks]

    def expect(self, optimizers: Sequence[Optimizer]) -> None:
        """Make blocks of their states as soon as a parameter of theirs is one, if every optimizer is managed."""
        for optimizer in optimizers if self._automatic else ():
            self._optimizers.of(optimizer).adoption_due = True

    def managed(self, optimizer: Optimizer) -> ManagedOptimizer:
        """Return what is known of the optimizer."""
        return self._optimizers.of(optimizer)

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
            self._optimizers.look_for_buckets()

    def _loaded(self, optimizer: Optimizer) -> None:
        """Make blocks of loaded states at once, not when the next step finds them."""
        with uninterrupted():
            self._optimizers.of(optimizer).adoption_due = True
            self.between_regions()

    # -- around a step

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        refuse_overlapping(optimizer)
        inside = optimizer_inside(optimizer)
        if inside is not None:  # its step is the one that counts
            self._owners.mark(inside)
            if self._broadcasts is not None:
                self._broadcasts.watch(optimizer)
            return None
        with uninterrupted():
            self._optimizers.of(optimizer).step_ended()  # if the step before failed
        if closure_of(args, kwargs) is not None and calls_closure_first(optimizer):
            return after_closure(args, kwargs, lambda: self.begin(optimizer, args, kwargs))
        self.begin(optimizer, args, kwargs)
        return None

    def begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a step by subgroups, or bring in what it touches. Its gradients are there: a closure has been called."""
        with uninterrupted():
            self._begin(optimizer, args, kwargs)

    def _begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        managed = self._optimizers.of(optimizer)
        self.between_regions()
        included = self._automatic or managed.chosen
        if self.overlap is not None:
            self.overlap.step_begins(optimizer, args, kwargs, managed=included)
        if not included or not self._active() or not managed.has_blocks:
            return
        reason = managed.reason_to_stay_whole(args, kwargs)
        if reason is not None:
            if managed.keeps_masters:
                refuse_with_masters(optimizer, reason)
            self._say(f"{type(optimizer).__name__} is updated as a whole: {reason}")
            if closure_of(args, kwargs) is not None and not calls_closure_first(optimizer):  # its passes need the memory
                return
        if not managed.adopted:
            managed.adopt(self._loaded)
        if reason is None:
            undo_if_interrupted(managed.step_ended)  # also if PyTorch's own call, or the way to it, is interrupted
            self._subgroups.run(managed, done=self.overlap.done(optimizer) if self.overlap is not None else frozenset())
        else:
            self._whole.begin(managed, reason)

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.info("%s", message)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if optimizer_inside(optimizer) is not None:
            return
        with uninterrupted():
            self._end(self._optimizers.of(optimizer))

    def _end(self, managed: ManagedOptimizer) -> None:
        cut = managed.step_ended()
        forget_undo(managed.step_ended)
        whole = self._whole.end(managed)
        if managed.has_had_blocks:
            if not (cut or whole) and (self._automatic or managed.chosen) and self._active() and self._reads_where_it_waits:
                managed.adopt(self._loaded)  # the states that the step may have made
            managed.states.count()
            self._step_done(managed.optimizer)
