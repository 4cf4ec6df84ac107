"""Steps that are cut: the subgroups of an optimizer are updated one after the other, each as a stage.

[Note: One subgroup ahead]
While one subgroup is updated, the states of the one before leave the device and those of the next one arrive. A plan says when.
Without a plan, each subgroup asks for the blocks that the next one lacks, and for room for them. The blocks of the subgroup
before then leave first, since they are used again last of all.
A parameter that is too large for that is a subgroup by itself, and updated by slices.

[Note: Updates by slices]
An elementwise update of some elements of a parameter needs the same elements of the states and no others. Where parameter,
gradient and states do not fit together, or would take most of the room, the states wait in their slots in the lower tiers, and
the pager lends the slots (see [Note: Lent slots]). While one slice of the states is updated, the next ones are read and the one
before is written back, through a ring of buffers that counts as the stage's workspace. Parameter and gradient are on the device
as a whole.

The arithmetic is the optimizer's own, over flat views of parameter and gradient, with the buffers as states. Each slice gets the
counters as they were before the step; the counters that the last slice leaves are kept. States that do not exist yet get their
slots first, by blocks that leave at once, and their content slice by slice.

The bits are those of the whole update: slices begin at multiples of ALIGNMENT_BYTES elements, so that vectorised loops leave the
same elements over at the end. With several threads, PyTorch's loops on CPU also leave some elements over at the end of each
thread's share, and round those of 16 bits differently: which ones depends on the number of threads, with and without slices.

In a trace, the states are not among the blocks of the stage: no stage has them on the device, and no plan could move them. The
time that their slices are on the links is part of the stage's time. The planner does not know that prefetches share the links
with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from planner.errors import StorageError
from runtime.device import Mark
from runtime.execution import StageRun
from runtime.paging import Block, Pager, State
from runtime.storage import ALIGNMENT_BYTES, RangeCopy, align_up, in_turns
from runtime.system import annotate
from teraio.following import IterationObserver
from teraio.optimizer.arithmetic import Replica, copied, run_step, update_replicas
from teraio.optimizer.facts import OptimizerFacts, OwnedParameter
from teraio.optimizer.host import HostRates, HostUpdate, HostUpdates
from teraio.optimizer.managed import ManagedOptimizer
from teraio.optimizer.subgroups import SLICE_BUFFERS, ParameterSubgroup, PendingStep, Slicing


@dataclass(eq=False)
class SubgroupSteps:
    """Runs steps by subgroups. host: runs updates there; call its `close` at the end.

    rates: of updates on the host; None if there is no host tier. ensure_room: called before an optimizer makes states, with the
    bytes of all states that it will have; may raise StorageFullError.
    """

    pager: Pager
    observer: IterationObserver
    _: KW_ONLY
    rates: HostRates | None = None
    ensure_room: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        self.host = HostUpdates(self.pager, threads=None if self.rates is None else self.rates.threads)

    def run(self, managed: ManagedOptimizer, *, done: frozenset[int] = frozenset()) -> None:
        """Update all parameters of the optimizer, and leave PyTorch's own call of `step` none.

        done: numbers of the parameters that are updated already. Waits for blocks. Raises BudgetError if an update does not fit,
        StorageError if a copy failed.
        """
        step = managed.pending_step()
        with self.pager.region():
            try:
                subgroups = [each for each in managed.subgroups.of(step) if not done or not done.issuperset(each.numbers)]
                made_bytes = sum(subgroup.made_bytes for subgroup in subgroups)
                if self.ensure_room is not None and made_bytes:
                    there = {block for subgroup in subgroups for block in subgroup.states}
                    self.ensure_room(sum(block.size_bytes for block in there) + made_bytes)
                self.observer.region_begins(managed.identity, len(subgroups))
                _SubgroupStep(self, managed, step, subgroups).run()
            finally:
                self.observer.region_ended()
        managed.leave_nothing()


@dataclass(slots=True)
class _SubgroupStep:
    """One step. Updates on the host begin first, and run while the device updates the other subgroups."""

    by: SubgroupSteps
    managed: ManagedOptimizer
    step: PendingStep
    subgroups: Sequence[ParameterSubgroup]

    def run(self) -> None:
        """Update all subgroups."""
        observer, host = self.by.observer, self.by.host
        wanted = observer.plan.updates_on_host
        begun: dict[int, HostUpdate] = {}
        with ExitStack() as failed:
            for number in wanted:
                parameters = [self.step.parameters[own] for own in self.subgroups[number].numbers]
                update = host.begin(self.step.facts, parameters)
                if update is not None:
                    begun[number] = update
                    failed.callback(update.give_up)  # the last one first, so that those in the queue do not begin
            # The device does not wait for the host: it updates the others meanwhile.
            for number, subgroup in enumerate(self.subgroups):
                on_host = begun[number].members if number in begun else frozenset()
                self._run_stage(number, self._without(subgroup, on_host))
            for number, update in begun.items():
                seconds = update.seconds()
                if seconds is not None:
                    observer.recorder.updated_on_host(number, seconds)
                else:
                    self._update_later(number, update.members)
            failed.pop_all()
        for number in wanted:
            for block in self.subgroups[number].states:  # to where they can be updated the next time
                self.by.pager.offload(block, "host")

    def _without(self, subgroup: ParameterSubgroup, numbers: frozenset[int]) -> ParameterSubgroup:
        """Return the subgroup without these parameters."""
        if not numbers:
            return subgroup
        return self.managed.subgroups.one(self.step, [number for number in subgroup.numbers if number not in numbers])

    def _run_stage(self, number: int, on_device: ParameterSubgroup) -> None:
        """Run one stage of the step. on_device: the parameters of the subgroup that are not updated on the host."""
        observer, subgroup, name = self.by.observer, self.subgroups[number], _stage_name(number)
        with self._slices(on_device, name) as slices:
            fetch = observer.stage_reached()
            unplanned = number + 1 < len(self.subgroups) and not observer.plan.in_step
            following = self.subgroups[number + 1].read if unplanned else ()
            begin, end, made = self._update(on_device, name, slices, following=following, fetch=fetch)
            observer.stage_ended(
                StageRun(
                    name=name,
                    phase="optimizer",
                    workspace_bytes=subgroup.temporary_bytes,
                    elements=subgroup.elements,
                    host_seconds=self._host_seconds(subgroup),
                    read=subgroup.read,
                    made=made,
                    written=subgroup.written,
                ),
                begin,
                end,
            )

    def _update_later(self, number: int, members: frozenset[int]) -> None:
        """Update on the device the parameters that were to be updated on the host and could not be."""
        name, subgroup = _stage_name(number), self.subgroups[number]
        missed = self._without(subgroup, frozenset(subgroup.numbers) - members)
        with self._slices(missed, name) as slices:
            begin, end, _ = self._update(missed, name, slices)
        self.by.observer.recorder.updated_later(number, begin, end)

    @contextmanager
    def _slices(self, subgroup: ParameterSubgroup, stage: str) -> Iterator[SlicedUpdate | None]:
        """Within, the states of a parameter that is updated by slices are lent; None for all other subgroups.

        States that do not exist are made. Waits until all states are in the lower tiers. Raises StorageError if a copy failed,
        and BudgetError if a new state does not fit.
        """
        plan, pager, facts = subgroup.slicing, self.by.pager, self.step.facts
        if plan is None:
            yield None
            return
        owned = self.step.parameters[subgroup.numbers[0]]
        states: dict[str, tuple[Tensor, Block]] = {}
        with ExitStack() as lent:
            for name, dtype in plan.states.items():
                if name in plan.fresh:
                    tensor = _make(pager, owned.tensor, dtype, self.managed.state_name(owned, name), stage)
                else:
                    tensor = facts.optimizer.state[owned.tensor][name]
                block = pager.known_block(tensor)
                if block is None:
                    raise StorageError("a state is updated by slices but is no block; this is a bug in teraio, please report it")
                pager.lending.lend([block])
                lent.callback(pager.lending.give_back, [block])
                states[name] = tensor, block
            yield SlicedUpdate(pager, facts, owned, plan, states)

    def _update(
        self,
        subgroup: ParameterSubgroup,
        name: str,
        slices: SlicedUpdate | None,
        *,
        following: Sequence[Block] = (),
        fetch: Sequence[Block] = (),
    ) -> tuple[Mark, Mark, list[Block]]:
        """Update a subgroup on the device. Return when that began and ended, and the states that it made.

        following: blocks of the next subgroup, without a plan. fetch: blocks that the plan prefetches from now on.
        """
        pager, read = self.by.pager, subgroup.read
        parameters = [self.step.parameters[number] for number in subgroup.numbers]
        touched = [(owned.tensor.grad, self.step.updates[owned.number].gradient) for owned in parameters]
        # Without a plan, one subgroup ahead: the next one's blocks come in while this one is updated.
        missing = [block for block in following if block.state is State.OFFLOADED]
        pager.acquire(read, subgroup.workspace_bytes, name, then_fetch=missing or fetch, in_one_piece=True)
        made: list[Block] = []
        unchanged: set[Block] = set()
        gradients: GradientVersions | None = None
        try:
            try:
                pager.evict_until_free(sum(block.size_bytes for block in missing), keep=following)
                begin = self.by.observer.mark()
                gradients = GradientVersions(self.managed.facts.optimizer, touched)
                with annotate("update", name):
                    if slices is not None:
                        slices.run()
                    else:
                        run_step(self.step.facts, parameters)
                end = self.by.observer.mark()
            finally:
                # Before the pager takes back what was reserved for new states.
                if subgroup.fresh_bytes:
                    made = self.managed.made_states(parameters, read)
                if gradients is not None:
                    unchanged = gradients.unchanged()
        finally:
            pager.retire(read, [b for b in read if b not in unchanged or b in subgroup.written])
        return begin, end, made

    def _host_seconds(self, subgroup: ParameterSubgroup) -> float | None:
        """Return how long the update takes on the host; None if it cannot run there, or nobody knows."""
        rates, pager = self.by.rates, self.by.pager
        if rates is None or subgroup.dtype is None:
            return None
        if subgroup.slicing is not None and not pager.lending.waits_in_host_tier(subgroup.states):
            return None  # no plan would move its states there
        for number in subgroup.numbers:
            owned, block = self.step.parameters[number], self.step.updates[number].parameter
            if block is not None and block.span is not None and not self.step.facts.updates_alone(owned.tensor):
                return None  # it would be updated there, by its size, but other ranks update it too
        return rates.seconds(self.step.facts, subgroup.dtype, subgroup.elements)


def _stage_name(number: int) -> str:
    return f"optimizer/subgroup.{number}"


class GradientVersions:
    """The versions that some gradients of an optimizer, each with its block, had before an update.

    Tells which gradients the update has not changed, so that their copies in the lower tiers stay valid.
    """

    # Correct for the optimizers of torch.optim: none of them writes through `.data`, which does not change the version.

    def __init__(self, optimizer: Optimizer, gradients: Iterable[tuple[Tensor | None, Block | None]]) -> None:
        # A fused optimizer that a GradScaler drives divides gradients in place, and does not change the version.
        scaled = getattr(optimizer, "grad_scale", None) is not None
        known = ((gradient, block) for gradient, block in gradients if gradient is not None and block is not None)
        found = ((gradient, block) for gradient, block in known if not gradient.is_inference())
        self._versions = [] if scaled else [(gradient, block, gradient._version) for gradient, block in found]

    def unchanged(self) -> set[Block]:
        """Return the blocks of gradients that have not been written since."""
        written = {block for gradient, block, version in self._versions if gradient._version != version}
        return {block for _, block, _ in self._versions} - written


# -- the update of one parameter by slices

_READ_AHEAD = 2  # slices that are read ahead while one is updated


def _make(pager: Pager, parameter: Tensor, dtype: torch.dtype, name: str, stage: str) -> Tensor:
    """Make a state whose content is yet to come."""
    pager.acquire([], parameter.numel() * dtype.itemsize, stage)
    try:
        tensor = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        pager.show_to_user([pager.block_of(tensor, name=name, kind="optimizer_state", user_visible=False)])
    finally:
        pager.retire([], [])
    return tensor


@dataclass(frozen=True, slots=True)
class SlicedUpdate:
    """The update of one parameter. states: those in `plan`, by name, with their blocks, which the pager lends meanwhile."""

    pager: Pager
    facts: OptimizerFacts
    owned: OwnedParameter
    plan: Slicing
    states: dict[str, tuple[Tensor, Block]]

    def run(self) -> None:
        """Update all slices. Waits until the last ones are written, or will be before the device goes on.

        Parameter and gradient must be on the device. Raises StorageError if a copy failed; a note on the error says whether other
        slices were updated before.
        """
        begins = self._in_order()
        left: dict[str, Any] = {}
        updated = 0
        try:
            with _Ring(self) as ring:
                for number in range(min(_READ_AHEAD, len(begins))):
                    ring.read(number, begins[number])
                for number, begin in enumerate(begins):
                    if number + _READ_AHEAD < len(begins):
                        ring.read(number + _READ_AHEAD, begins[number + _READ_AHEAD])
                    left = self._update(begin, ring.take(number, begin))
                    updated += 1
                    ring.write(number, begin)
                ring.finish()
        except BaseException as error:
            if updated:
                error.add_note(
                    f"{updated} of {len(begins)} slices of the parameter whose update failed are done, the others are not: go on "
                    "from a checkpoint"
                )
            raise
        self._take_over(left)

    def _in_order(self) -> list[int]:
        """Return the first element of each slice, in an order in which drives take turns."""
        begins = list(range(0, self.plan.elements, self.plan.slice_elements))
        for name, dtype in self.plan.states.items():
            if (slot := self.states[name][1].slot) is not None:
                return [place // dtype.itemsize for place in in_turns(slot, [begin * dtype.itemsize for begin in begins])]
        return begins

    def _update(self, begin: int, buffers: dict[str, Tensor]) -> dict[str, Any]:
        """Update one slice, with its states in `buffers`. Return the state that the optimizer leaves, these tensors in it."""
        parameter = self.owned.tensor
        piece = _flat(parameter, begin, self.plan.slice_elements)
        piece.grad = _flat(parameter.grad, begin, self.plan.slice_elements) if parameter.grad is not None else None
        before = {
            name: buffers[name] if name in buffers and name not in self.plan.fresh else copied(value)
            for name, value in self.facts.optimizer.state.get(parameter, {}).items()
        }
        replica = Replica(group=self.owned.group, parameter=piece, state=before)
        with annotate("update", lambda: f"slice of {self.plan.slice_elements} elements from {begin}"):
            update_replicas(self.facts, [replica])
        for name, buffer in buffers.items():
            if replica.state[name] is not buffer:  # the update has made it, or put another tensor in its place
                replica.state[name] = buffer.copy_(replica.state[name])
        return replica.state

    def _take_over(self, left: dict[str, Any]) -> None:
        """Take the counters from the last slice, and states that were made, in the order in which the optimizer makes them."""
        if not left:
            return
        state = self.facts.optimizer.state[self.owned.tensor]
        for name, value in left.items():
            known = state.get(name)
            if name in self.states:
                state[name], _ = self.states[name]
            elif isinstance(value, Tensor) and isinstance(known, Tensor) and known.shape == value.shape:
                known.copy_(value)  # user code may hold the counter
            else:
                state[name] = value


class _Ring:
    """Buffers for SLICE_BUFFERS slices of all states, and the copies from and to them. On leaving it, all copies have ended."""

    def __init__(self, update: SlicedUpdate) -> None:
        self._pager, self._plan, self._states = update.pager, update.plan, update.states
        self._reading: dict[int, list[RangeCopy]] = {}
        self._writing: dict[int, list[RangeCopy]] = {}
        memory = torch.empty(self._plan.buffer_bytes, dtype=torch.uint8, device=update.owned.tensor.device)
        memory = memory[-memory.data_ptr() % ALIGNMENT_BYTES :]  # drives are read past the page cache into whole pages
        self._buffers: dict[str, Tensor] = {}  # a row for each slice
        for name, dtype in self._plan.states.items():
            own, memory = memory.tensor_split([SLICE_BUFFERS * self._plan.slice_elements * dtype.itemsize])
            self._buffers[name] = own.view(SLICE_BUFFERS, -1)

    def __enter__(self) -> _Ring:
        return self

    def __exit__(self, *_: object) -> None:
        for copies in (*self._reading.values(), *self._writing.values()):  # copies run here only after an error, which says why
            for copy in copies:
                with suppress(StorageError):
                    copy()
        self._buffers.clear()  # the traceback of an error would keep them

    def read(self, number: int, begin: int) -> None:
        """Begin to read a slice. Waits until the slice before it in the same buffers is written."""
        _wait(self._writing, number - SLICE_BUFFERS)
        self._begin(self._reading, number, begin, to_slot=False)

    def take(self, number: int, begin: int) -> dict[str, Tensor]:
        """Return the slices of all states. Waits until they are read."""
        _wait(self._reading, number)
        length = self._length(begin)
        return {name: self._bytes(number, begin, name).view(dtype)[:length] for name, dtype in self._plan.states.items()}

    def write(self, number: int, begin: int) -> None:
        """Begin to write a slice."""
        self._begin(self._writing, number, begin, to_slot=True)

    def _begin(self, copies: dict[int, list[RangeCopy]], number: int, begin: int, *, to_slot: bool) -> None:
        begun = copies[number] = []  # there before the first copy begins: if the next one fails, somebody waits for it
        for name, dtype in self._plan.states.items():
            if to_slot or name not in self._plan.fresh:
                block, memory = self._states[name][1], self._bytes(number, begin, name)
                begun.append(self._pager.lending.copy_range(block, begin * dtype.itemsize, memory, to_slot=to_slot))

    def finish(self) -> None:
        """Wait until all slices are written."""
        for number in list(self._writing):
            _wait(self._writing, number)

    def _length(self, begin: int) -> int:
        return min(self._plan.slice_elements, self._plan.elements - begin)

    def _bytes(self, number: int, begin: int, name: str) -> Tensor:
        """Return the buffer of a state's slice, in whole pages."""
        size = align_up(self._length(begin) * self._plan.states[name].itemsize)
        return self._buffers[name][number % SLICE_BUFFERS, :size]


def _wait(copies: dict[int, list[RangeCopy]], number: int) -> None:
    """Wait for the copies of slice `number`, if there are any, and forget them."""
    with annotate("wait", "for copies of a slice"):
        for copy in copies.get(number, ()):
            copy()
    copies.pop(number, None)


def _flat(tensor: Tensor, begin: int, length: int) -> Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,), 0)[begin : begin + length]
