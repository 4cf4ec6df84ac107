"""The optimizer step under the budget: run by subgroups of parameters, each one a stage.

Works with unmodified `torch.optim` optimizers through PyTorch's global step hooks: the pre-hook runs the undecorated
`step` once for every subgroup with `param_groups` narrowed to it and leaves the groups empty for the original call, so
schedulers, state and hooks see one ordinary step. An optimizer that cannot be cut runs whole, see `teraio.optimizer.whole`.

[Note: One subgroup ahead]
While a subgroup updates, the states of the one before leave and those of the next one arrive. A plan says when. Without one,
each subgroup asks for what the next one lacks, and for room for that: the states of the one before are used last of all.
A parameter that is too large for that is a subgroup by itself, see [Note: Updates by slices].
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from runtime.device import Mark
from runtime.execution import StageRun
from runtime.paging import Block, Pager, State
from runtime.system import annotate
from teraio.optimizer.capabilities import OwnHooks, has_closure, keeps_masters, reason_to_stay_whole
from teraio.optimizer.gradients import GradientVersions
from teraio.optimizer.host import HostUpdate, HostUpdates
from teraio.optimizer.host_rates import HostRates
from teraio.optimizer.in_backward.steps import OverlappedSteps
from teraio.optimizer.master_hooks import refuse_with_masters
from teraio.optimizer.masters import run_step
from teraio.optimizer.sliced import SlicedUpdate, SlicedUpdates
from teraio.optimizer.states import OptimizerStates
from teraio.optimizer.subgroup_sizes import SubgroupSizes
from teraio.optimizer.subgroups import OptimizerParts, Part, Update
from teraio.optimizer.whole import WholeSteps
from teraio.profiling import IterationRecorder

logger = logging.getLogger("teraio")


class OptimizerSteps(OwnHooks):
    """Hooks every optimizer of the process that updates managed parameters. Call `close` to unhook.

    active: whether steps are run under management now. step_done is called with the optimizer after each step of it, when
    all bookkeeping is finished. automatic: manage every optimizer; False: only those given to `manage`. ensure_room is called
    before an optimizer makes states, with the bytes of all that it will have; it may refuse by a StorageFullError. rates: of
    updates on the host, None if there is no host tier. sizes: chooses how large subgroups are. overlap: update inside the
    backward pass what may be; regions then take part in that through the attribute `overlap`.
    """

    def __init__(
        self,
        pager: Pager,
        timeline: IterationRecorder,
        *,
        active: Callable[[], bool],
        step_done: Callable[[Optimizer], None],
        automatic: bool = True,
        ensure_room: Callable[[int], None] | None = None,
        rates: HostRates | None = None,
        sizes: SubgroupSizes | None = None,
        overlap: bool = False,
    ) -> None:
        self._pager = pager
        self._timeline = timeline
        self._active = active
        self._step_done = step_done
        self._automatic = automatic
        self._ensure_room = ensure_room
        self._states = OptimizerStates(pager, timeline)
        self._parts = OptimizerParts(pager, self._states, sizes)
        self._rates = rates
        self._host = HostUpdates(pager)
        self._slices = SlicedUpdates(pager, self._states)
        self._whole = WholeSteps(pager, timeline, self._states, self._parts)
        self.overlap: OverlappedSteps | None = None
        if overlap:
            self.overlap = OverlappedSteps(pager, timeline, self._states, self._parts)
        self._chosen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._to_adopt: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._loads: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()
        self._narrowed: dict[int, list[list[Any]]] = {}
        self._said: set[str] = set()
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def close(self) -> None:
        """Remove the hooks. Blocks until no update is under way."""
        self._whole.give_up()
        self._host.close()
        for handle in (*self._handles, *self._loads.values()):
            handle.remove()

    def manage(self, optimizer: Optimizer) -> None:
        """Manage this optimizer, whatever `automatic` says; states that it has become blocks as soon as a parameter is one."""
        self._chosen.add(optimizer)
        self._to_adopt.add(optimizer)
        self.between_regions()

    def between_regions(self) -> None:
        """Catch up with what user code has done: a step that failed, states that were given or loaded. May copy states."""
        self._whole.give_up()
        if self._to_adopt and self._active():
            for optimizer in [each for each in self._to_adopt if self._is_ours(each)]:
                self._adopt(optimizer)

    def _is_ours(self, optimizer: Optimizer) -> bool:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        return any(self._pager.known_block(p) is not None for p in parameters)

    def _adopt(self, optimizer: Optimizer) -> None:
        """Its states become blocks; those that `load_state_dict` brings do so at once, not when the next step finds them."""
        self._to_adopt.discard(optimizer)
        self._states.adopt(optimizer)
        if optimizer not in self._loads:
            self._loads[optimizer] = optimizer.register_load_state_dict_post_hook(self._loaded)

    def _loaded(self, optimizer: Optimizer) -> None:
        self._to_adopt.add(optimizer)
        self.between_regions()

    # -- around a step

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.between_regions()
        managed = self._automatic or optimizer in self._chosen
        if self.overlap is not None:
            self.overlap.step_begins(optimizer, args, kwargs, managed=managed)
        if not managed or not self._active() or not self._is_ours(optimizer):
            return
        reason = reason_to_stay_whole(optimizer, args, kwargs)
        if reason is not None:
            if keeps_masters(optimizer):
                refuse_with_masters(optimizer, reason)
            self._say(f"{type(optimizer).__name__} is not updated by parts: {reason}")
            if has_closure(args, kwargs):  # which needs the memory for its own passes
                return
        if optimizer not in self._loads:
            self._adopt(optimizer)
        if reason is None:
            self._step_by_parts(optimizer)
        else:
            self._whole.begin(optimizer, reason)

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.info("%s", message)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        groups = self._narrowed.pop(id(optimizer), None)
        if groups is not None:
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters
        self._whole.end(optimizer)
        if self._is_ours(optimizer):
            self._states.count(optimizer)
            self._step_done(optimizer)

    # -- by parts

    def _step_by_parts(self, optimizer: Optimizer) -> None:
        updates = self._parts.updates(optimizer)
        groups = [group["params"] for group in optimizer.param_groups]
        with self._pager.device.region():
            self._pager.enter_region()
            try:
                parts = self._parts.parts(optimizer, updates)
                if self.overlap is not None:
                    done = self.overlap.done(optimizer)
                    parts = [part for part in parts if not done or not done.issuperset(part.numbers)]
                if self._ensure_room is not None and any(part.made_bytes for part in parts):
                    made = {block for part in parts for block in part.states}
                    self._ensure_room(sum(block.size_bytes for block in made) + sum(part.made_bytes for part in parts))
                self._timeline.region_begins(("optimizer", id(optimizer)), len(parts))
                self._run_parts(optimizer, groups, updates, parts)
            finally:
                self._timeline.region_ended()
                self._pager.leave_region()
        for group in optimizer.param_groups:
            group["params"] = []
        self._narrowed[id(optimizer)] = groups

    def _run_parts(
        self, optimizer: Optimizer, groups: list[list[Any]], updates: list[list[Update]], parts: Sequence[Part]
    ) -> None:
        wanted = self._timeline.subgroups_on_host
        begun: dict[int, HostUpdate] = {}
        with ExitStack() as failed:
            for number in wanted:
                update = self._host.begin(optimizer, parts[number].numbers)
                if update is not None:
                    begun[number] = update
                    failed.callback(update.give_up)  # the last one first: those that wait for others do not begin then
            for number, part in enumerate(parts):
                rest = part
                if number in begun:
                    rest = self._parts.part(optimizer, updates, part.slices, without=begun[number].members)
                with self._slices.lent(optimizer, rest, f"optimizer/subgroup.{number}") as sliced:
                    self._step_part(optimizer, groups, number, parts, rest, sliced)
            for number, update in begun.items():
                seconds = self._host.wait_for(update)
                if seconds is not None:
                    self._timeline.updated_on_host(number, seconds)
                else:
                    self._update_later(optimizer, groups, updates, number, parts[number], update.members)
            failed.pop_all()
        for number in wanted:
            for block in parts[number].states:  # to where they can be updated the next time
                self._pager.offload(block, "host")

    def _update_later(
        self,
        optimizer: Optimizer,
        groups: list[list[Any]],
        updates: list[list[Update]],
        number: int,
        part: Part,
        members: frozenset[int],
    ) -> None:
        """On the device, what was to update on the host and could not."""
        name, others = f"optimizer/subgroup.{number}", frozenset(part.numbers) - members
        missed = self._parts.part(optimizer, updates, part.slices, without=others) if others else part
        with self._slices.lent(optimizer, missed, name) as sliced:
            begin, end, _ = self._update(optimizer, groups, missed, name, sliced)
        self._timeline.updated_later(number, begin, end)

    def _step_part(
        self,
        optimizer: Optimizer,
        groups: list[list[Any]],
        number: int,
        parts: Sequence[Part],
        own: Part,
        sliced: SlicedUpdate | None,
    ) -> None:
        """A stage of the step; own: what the device updates of the part, `sliced` if that is by slices."""
        part, name = parts[number], f"optimizer/subgroup.{number}"
        fetch = self._timeline.stage_reached()
        following = parts[number + 1].read if number + 1 < len(parts) and not self._timeline.in_step else ()
        begin, end, made = self._update(optimizer, groups, own, name, sliced, following=following, fetch=fetch)
        self._timeline.stage_ended(
            StageRun(
                name=name,
                phase="optimizer",
                begin=begin,
                end=end,
                workspace_bytes=part.temporary_bytes,
                elements=part.elements,
                host_seconds=self._host_seconds(optimizer, part),
                read=part.read,
                made=made,
                written=part.written,
            )
        )

    def _update(
        self,
        optimizer: Optimizer,
        groups: list[list[Any]],
        part: Part,
        name: str,
        sliced: SlicedUpdate | None,
        *,
        following: Sequence[Block] = (),
        fetch: Sequence[Block] = (),
    ) -> tuple[Mark, Mark, list[Block]]:
        """Update a part on the device. Gives when that began and ended, and the states that it made."""
        missing = [block for block in following if block.state is State.OFFLOADED]
        self._pager.acquire(part.read, part.workspace_bytes, name, then_fetch=missing or fetch)
        made: list[Block] = []
        gradients: GradientVersions | None = None
        try:
            self._pager.evict_until_free(sum(block.size_bytes for block in missing), keep=following)
            begin = self._pager.device.mark()
            for group, parameters, chosen in zip(optimizer.param_groups, groups, part.chosen, strict=True):
                group["params"] = [parameters[index] for index in chosen]
            gradients = GradientVersions(optimizer)
            with annotate("update", name):
                if sliced is not None:
                    sliced.run()
                else:
                    run_step(optimizer)
            end = self._pager.device.mark()
        finally:
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters
            # Before what was reserved for new states is given back.
            made = self._states.made(optimizer, part.numbers, part.read) if part.fresh_bytes else []
            unchanged = gradients.unchanged(self._pager.known_block) if gradients is not None else set()
            self._pager.retire(part.read, [b for b in part.read if b not in unchanged or b in part.written])
        return begin, end, made

    def _host_seconds(self, optimizer: Optimizer, part: Part) -> float | None:
        if self._rates is None or part.dtype is None:
            return None
        if part.slicing is not None and not self._pager.waits_in_host_tier(part.states):
            return None  # no plan would move its states there
        return self._rates.seconds(optimizer, part.dtype, part.elements)
