"""Steps that are cut: the subgroups of an optimizer are updated one after the other, each as a stage.

[Note: One subgroup ahead]
While one subgroup is updated, the states of the one before leave the device and those of the next one arrive. A plan says when.
Without a plan, each subgroup asks for the blocks that the next one lacks, and for room for them. The blocks of the subgroup
before then leave first, since they are used again last of all.
A parameter that is too large for that is a subgroup by itself, see [Note: Updates by slices].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass

from torch import Tensor
from torch.optim import Optimizer

from runtime.device import Mark
from runtime.execution import StageRun
from runtime.paging import Block, Pager, State
from runtime.system import annotate
from teraio.following import IterationObserver
from teraio.optimizer.arithmetic import run_step
from teraio.optimizer.facts import OwnedParameter
from teraio.optimizer.host import HostRates, HostUpdate, HostUpdates
from teraio.optimizer.managed import ManagedOptimizer
from teraio.optimizer.slices import SlicedUpdate, lent_slices
from teraio.optimizer.subgroups import ParameterSubgroup, PendingStep


@dataclass(eq=False)
class SubgroupSteps:
    """Runs steps by subgroups. Call `close` at the end.

    rates: of updates on the host; None if there is no host tier. ensure_room: called before an optimizer makes states, with the
    bytes of all states that it will have; may raise StorageFullError.
    """

    pager: Pager
    recorder: IterationObserver
    _: KW_ONLY
    rates: HostRates | None = None
    ensure_room: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        self.host = HostUpdates(self.pager, threads=None if self.rates is None else self.rates.threads)

    def close(self) -> None:
        """Wait until no update runs on the host."""
        self.host.close()

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
                self.recorder.region_begins(managed.identity, len(subgroups))
                _SubgroupStep(self, managed, step, subgroups).run()
            finally:
                self.recorder.region_ended()
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
        recorder, host = self.by.recorder, self.by.host
        wanted = recorder.plan.updates_on_host
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
                    recorder.recorder.updated_on_host(number, seconds)
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
        recorder, subgroup, name = self.by.recorder, self.subgroups[number], _stage_name(number)
        with self._slices(on_device, name) as slices:
            fetch = recorder.stage_reached()
            unplanned = number + 1 < len(self.subgroups) and not recorder.plan.in_step
            following = self.subgroups[number + 1].read if unplanned else ()
            begin, end, made = self._update(on_device, name, slices, following=following, fetch=fetch)
            recorder.stage_ended(
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
        name, subgroup = _stage_name(number), self.subgroups[number]
        missed = self._without(subgroup, frozenset(subgroup.numbers) - members)
        with self._slices(missed, name) as slices:
            begin, end, _ = self._update(missed, name, slices)
        self.by.recorder.recorder.updated_later(number, begin, end)

    @contextmanager
    def _slices(self, subgroup: ParameterSubgroup, stage: str) -> Iterator[SlicedUpdate | None]:
        """Within, the states of a parameter that is updated by slices are lent; None for all other subgroups."""
        if subgroup.slicing is None:
            yield None
            return
        owned = self.step.parameters[subgroup.numbers[0]]
        facts, name_of = self.step.facts, self.managed.state_name
        with lent_slices(self.by.pager, facts, owned, subgroup.slicing, stage, lambda name: name_of(owned, name)) as update:
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
        pager, read = self.by.pager, subgroup.read
        parameters = [self.step.parameters[number] for number in subgroup.numbers]
        # Without a plan, one subgroup ahead: the next one's blocks come in while this one is updated.
        missing = [block for block in following if block.state is State.OFFLOADED]
        pager.acquire(read, subgroup.workspace_bytes, name, then_fetch=missing or fetch, in_one_piece=True)
        made: list[Block] = []
        unchanged: set[Block] = set()
        gradients: GradientVersions | None = None
        try:
            try:
                pager.evict_until_free(sum(block.size_bytes for block in missing), keep=following)
                begin = self.by.recorder.mark()
                gradients = GradientVersions(self.managed.optimizer, parameters)
                with annotate("update", name):
                    if slices is not None:
                        slices.run()
                    else:
                        run_step(self.step.facts, parameters)
                end = self.by.recorder.mark()
            finally:
                # Before the pager takes back what was reserved for new states.
                if subgroup.fresh_bytes:
                    made = self.managed.made_states(parameters, read)
                if gradients is not None:
                    unchanged = gradients.unchanged(pager.known_block)
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
        for parameter in (self.step.parameters[number].tensor for number in subgroup.numbers):
            block = pager.known_block(parameter)
            if block is not None and block.span is not None and not self.step.facts.updates_alone(parameter):
                return None  # it would be updated there, by its size, but other ranks update it too
        return rates.seconds(self.step.facts, subgroup.dtype, subgroup.elements)


def _stage_name(number: int) -> str:
    return f"optimizer/subgroup.{number}"


class GradientVersions:
    """The versions that the gradients of some parameters of an optimizer had before an update.

    Tells which gradients the update has not changed, so that their copies in the lower tiers stay valid.
    """

    # Correct for the optimizers of torch.optim: none of them writes through `.data`, which does not change the version.

    def __init__(self, optimizer: Optimizer, parameters: Iterable[OwnedParameter]) -> None:
        # A fused optimizer that a GradScaler drives divides gradients in place, and does not change the version.
        scaled = getattr(optimizer, "grad_scale", None) is not None
        found = (owned.tensor.grad for owned in parameters)
        gradients = (gradient for gradient in found if gradient is not None and not gradient.is_inference())
        self._versions = [] if scaled else [(gradient, gradient._version) for gradient in gradients]

    def unchanged(self, block_of: Callable[[Tensor], Block | None]) -> set[Block]:
        """Return the blocks of gradients that have not been written since. block_of: returns the block of a tensor, if any."""
        same: dict[Block, bool] = {}
        for gradient, version in self._versions:
            block = block_of(gradient)
            if block is not None:
                same[block] = same.get(block, True) and gradient._version == version
        return {block for block, is_same in same.items() if is_same}
