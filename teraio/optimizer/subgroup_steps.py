"""Steps that are cut: the subgroups of an optimizer are updated one after the other, each as a stage.

[Note: One subgroup ahead]
While one subgroup is updated, the states of the one before leave the device and those of the next one arrive. A plan says when.
Without a plan, each subgroup asks for the blocks that the next one lacks, and for room for them. The blocks of the subgroup
before then leave first, since they are used again last of all.
A parameter that is too large for that is a subgroup by itself, see [Note: Updates by slices].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor

from runtime.device import MIN_MOVED_BYTES, Mark
from runtime.execution import StageRun
from runtime.paging import Block, Pager, State
from runtime.system import annotate
from teraio.following import IterationObserver
from teraio.optimizer.capabilities import updates_alone
from teraio.optimizer.gradients import GradientVersions
from teraio.optimizer.host import HostUpdate, HostUpdates
from teraio.optimizer.host_rates import HostRates
from teraio.optimizer.managed import ManagedOptimizer
from teraio.optimizer.masters import run_step
from teraio.optimizer.parameters import ParameterGroups, PendingStep
from teraio.optimizer.sliced import SlicedUpdate, lent_slices
from teraio.optimizer.subgroups import ParameterSubgroup


class SubgroupSteps:
    """Runs steps by subgroups. Call `close` at the end.

    rates: of updates on the host; None if there is no host tier. ensure_room: called before an optimizer makes states, with the
    bytes of all states that it will have; may raise StorageFullError.
    """

    def __init__(
        self,
        pager: Pager,
        recorder: IterationObserver,
        *,
        rates: HostRates | None = None,
        ensure_room: Callable[[int], None] | None = None,
        min_moved_bytes: int = MIN_MOVED_BYTES,
    ) -> None:
        self.pager = pager
        self.recorder = recorder
        self.rates = rates
        self.host = HostUpdates(pager, min_moved_bytes=min_moved_bytes, threads=None if rates is None else rates.threads)
        self._ensure_room = ensure_room

    def close(self) -> None:
        """Wait until no update runs on the host."""
        self.host.close()

    def run(self, managed: ManagedOptimizer, *, done: frozenset[int] = frozenset()) -> None:
        """Update all parameters of the optimizer, and leave PyTorch's own call of `step` none.

        done: numbers of the parameters that are updated already. Waits for blocks. Raises BudgetError if an update does not fit,
        StorageError if a copy failed.
        """
        step, groups = managed.pending_step(), ParameterGroups(managed.optimizer)
        with self.pager.device.region():
            self.pager.enter_region()
            try:
                subgroups = [each for each in managed.subgroups.of(step) if not done or not done.issuperset(each.numbers)]
                self._ensure_room_for_states(subgroups)
                self.recorder.region_begins(managed.identity, len(subgroups))
                _SubgroupStep(self, managed, step, groups, subgroups).run()
            finally:
                self.recorder.region_ended()
                self.pager.leave_region()
        managed.leave_nothing(groups)

    def _ensure_room_for_states(self, subgroups: Sequence[ParameterSubgroup]) -> None:
        if self._ensure_room is not None and any(subgroup.made_bytes for subgroup in subgroups):
            there = {block for subgroup in subgroups for block in subgroup.states}
            self._ensure_room(sum(block.size_bytes for block in there) + sum(subgroup.made_bytes for subgroup in subgroups))


class _SubgroupStep:
    """One step. Updates on the host begin first, and run while the device updates the other subgroups."""

    def __init__(
        self,
        steps: SubgroupSteps,
        managed: ManagedOptimizer,
        step: PendingStep,
        groups: ParameterGroups,
        subgroups: Sequence[ParameterSubgroup],
    ) -> None:
        self._pager = steps.pager
        self._recorder = steps.recorder
        self._rates = steps.rates
        self._host = steps.host
        self._managed = managed
        self._step = step
        self._groups = groups
        self._subgroups = subgroups

    def run(self) -> None:
        """Update all subgroups."""
        wanted = self._recorder.plan.updates_on_host
        begun: dict[int, HostUpdate] = {}
        with ExitStack() as failed:
            for number in wanted:
                update = self._host.begin(self._step.optimizer, self._step.owned(self._subgroups[number].numbers))
                if update is not None:
                    begun[number] = update
                    failed.callback(update.give_up)  # the last one first, so that those in the queue do not begin
            for number, subgroup in enumerate(self._subgroups):
                on_host = begun[number].members if number in begun else frozenset()
                self._run_stage(number, self._without(subgroup, on_host))
            for number, update in begun.items():
                seconds = self._host.wait_for(update)
                if seconds is not None:
                    self._recorder.recorder.updated_on_host(number, seconds)
                else:
                    self._update_later(number, update.members)
            failed.pop_all()
        for number in wanted:
            for block in self._subgroups[number].states:  # to where they can be updated the next time
                self._pager.offload(block, "host")

    def _without(self, subgroup: ParameterSubgroup, numbers: frozenset[int]) -> ParameterSubgroup:
        """Return the subgroup without these parameters."""
        return self._managed.subgroups.one(self._step, subgroup.ranges, without=numbers) if numbers else subgroup

    def _run_stage(self, number: int, on_device: ParameterSubgroup) -> None:
        """Run one stage of the step. on_device: the parameters of the subgroup that are not updated on the host."""
        subgroup, name = self._subgroups[number], _stage_name(number)
        with self._slices(on_device, name) as slices:
            fetch = self._recorder.stage_reached()
            unplanned = number + 1 < len(self._subgroups) and not self._recorder.plan.in_step
            following = self._subgroups[number + 1].read if unplanned else ()
            begin, end, made = self._update(on_device, name, slices, following=following, fetch=fetch)
            self._recorder.stage_ended(
                StageRun(
                    name=name,
                    phase="optimizer",
                    begin=begin,
                    end=end,
                    workspace_bytes=subgroup.temporary_bytes,
                    elements=subgroup.elements,
                    host_seconds=self._host_seconds(subgroup),
                    read=subgroup.read,
                    made=made,
                    written=subgroup.written,
                )
            )

    def _update_later(self, number: int, members: frozenset[int]) -> None:
        """Update on the device the parameters that were to be updated on the host and could not be."""
        name, subgroup = _stage_name(number), self._subgroups[number]
        missed = self._without(subgroup, frozenset(subgroup.numbers) - members)
        with self._slices(missed, name) as slices:
            begin, end, _ = self._update(missed, name, slices)
        self._recorder.recorder.updated_later(number, begin, end)

    @contextmanager
    def _slices(self, subgroup: ParameterSubgroup, name: str) -> Iterator[SlicedUpdate | None]:
        """Within, the states of a parameter that is updated by slices are lent; None for all other subgroups."""
        if subgroup.slicing is None:
            yield None
            return
        (owned,) = self._step.owned(subgroup.numbers)
        with lent_slices(self._pager, self._managed, owned, subgroup.slicing, name) as update:
            yield update

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
        optimizer, read = self._step.optimizer, subgroup.read
        missing = [block for block in following if block.state is State.OFFLOADED]
        self._pager.acquire(read, subgroup.workspace_bytes, name, then_fetch=missing or fetch, in_one_piece=True)
        made: list[Block] = []
        unchanged: set[Block] = set()
        gradients: GradientVersions | None = None
        try:
            try:
                self._pager.evict_until_free(sum(block.size_bytes for block in missing), keep=following)
                begin = self._recorder.mark()
                self._groups.narrow(subgroup.chosen)
                gradients = GradientVersions(optimizer)
                with annotate("update", name):
                    if slices is not None:
                        slices.run()
                    else:
                        run_step(optimizer)
                end = self._recorder.mark()
            finally:
                self._groups.restore()
                # Before the pager takes back what was reserved for new states.
                if subgroup.fresh_bytes:
                    made = self._managed.states.made(self._step.owned(subgroup.numbers), read)
                if gradients is not None:
                    unchanged = gradients.unchanged(self._pager.known_block)
        finally:
            self._pager.retire(read, [b for b in read if b not in unchanged or b in subgroup.written])
        return begin, end, made

    def _host_seconds(self, subgroup: ParameterSubgroup) -> float | None:
        """Return how long the update takes on the host; None if it cannot run there, or nobody knows."""
        if self._rates is None or subgroup.dtype is None:
            return None
        if subgroup.slicing is not None and not self._pager.waits_in_host_tier(subgroup.states):
            return None  # no plan would move its states there
        if any(self._stays_on_device(each.tensor) for each in self._step.owned(subgroup.numbers)):
            return None
        return self._rates.seconds(self._step.optimizer, subgroup.dtype, subgroup.elements)

    def _stays_on_device(self, parameter: Tensor) -> bool:
        """Whether a parameter would be updated on the host, by its size, but other ranks update it too."""
        block = self._pager.known_block(parameter)
        return block is not None and block.span is not None and not updates_alone(self._step.optimizer, parameter)


def _stage_name(number: int) -> str:
    return f"optimizer/subgroup.{number}"
