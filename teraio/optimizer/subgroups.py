"""Cuts the parameters of an optimizer into subgroups that are updated one after the other, and says what each one needs."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from planner.errors import BudgetError
from runtime.device import MIN_MOVED_BYTES
from runtime.paging import Block, Pager
from teraio.optimizer.capabilities import USUAL_STATES, temporary_bytes
from teraio.optimizer.masters import casting_bytes
from teraio.optimizer.parameters import ParameterUpdate, PendingStep
from teraio.optimizer.slicing import Slicing, slicing
from teraio.optimizer.subgroup_sizes import SubgroupSizes

_COUNTERS_BYTES = 16
"""Bytes reserved for a parameter's step counter and similar scalars."""

_PARTS = 2
"""Parameters whose gradients are in one block are one subgroup if they take at most the room divided by this."""

Ranges = tuple[tuple[int, int], ...]
"""The parameters of a subgroup: for each group, the first position and the one after the last. Keeps no parameter alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSubgroup:
    """Parameters that are updated together: which they are, and what their update needs.

    ranges: the cut that the parameters are from. chosen: their positions within each group. numbers: their numbers among all
    parameters of the optimizer. dtype: of the first of them.
    read, written, states: blocks. elements: of all its parameters.
    temporary_bytes: what the update allocates while it runs. fresh_bytes: of the states that it makes first.
    movable_fresh_bytes: of those fresh states that can leave the device.
    slicing: how the update of its only parameter is cut into slices, None if it is not. If it is, `states` are not among
    `read`, and states that are made first are not among `fresh_bytes`.
    """

    ranges: Ranges
    chosen: tuple[tuple[int, ...], ...]
    numbers: tuple[int, ...]
    dtype: torch.dtype | None
    read: tuple[Block, ...]
    written: tuple[Block, ...]
    states: tuple[Block, ...]
    elements: int
    temporary_bytes: int
    fresh_bytes: int
    movable_fresh_bytes: int
    slicing: Slicing | None = None

    @property
    def workspace_bytes(self) -> int:
        """What must be free on the device besides the blocks."""
        return self.temporary_bytes + self.fresh_bytes

    @property
    def made_bytes(self) -> int:
        """Bytes of all states that the update makes first, on the device or in the lower tiers."""
        return self.fresh_bytes + (self.slicing.fresh_bytes if self.slicing is not None else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """How the parameters were cut, and the sizes that they had then. sliced: numbers of those that are updated by slices."""

    sizes: tuple[tuple[int, ...], ...]
    ranges: tuple[Ranges, ...]
    sliced: frozenset[int]


class Subgroups:
    """The subgroups of one optimizer: the same in every iteration, as long as its parameters and the budget stay the same.

    Keeps neither the optimizer nor a parameter alive. min_moved_bytes: smaller states stay on the device. on_host: whether
    subgroups may be updated on the host, so that gradients in one block should be in one subgroup.
    """

    def __init__(
        self, pager: Pager, sizes: SubgroupSizes, *, min_moved_bytes: int = MIN_MOVED_BYTES, on_host: bool = False
    ) -> None:
        self._pager = pager
        self._on_host = on_host
        self._sizes = sizes
        self._min_moved_bytes = min_moved_bytes
        self._cut: _Cut | None = None

    def of(self, step: PendingStep) -> list[ParameterSubgroup]:
        """Return the subgroups in order. If one does not fit any more, cut all anew, one parameter each.

        Raises BudgetError if even then the update of one parameter does not fit.
        """
        known = self._cut
        if known is None or known.sizes != step.sizes:
            known = self._cut_anew(step, self._choose_bytes(step))
        subgroups = self._subgroups(step, known)
        budget = self._pager.budget_bytes
        if budget is not None and self.smallest_budget(subgroups)[0] > budget:
            known = self._cut_anew(step, 0)
            subgroups = self._subgroups(step, known)
            needed, number = self.smallest_budget(subgroups)
            if needed > budget:
                needed += self._other_states_bytes(step)
                raise BudgetError(smallest_bytes=needed, budget_bytes=budget, stage=f"optimizer/subgroup.{number}")
        self._cut = known
        return subgroups

    def whole(self, step: PendingStep) -> ParameterSubgroup:
        """Return all parameters as one subgroup."""
        return self.one(step, tuple((0, len(group)) for group in step.updates))

    def one(
        self,
        step: PendingStep,
        ranges: Ranges,
        slicings: Mapping[int, Slicing] = MappingProxyType({}),
        *,
        without: Collection[int] = (),
    ) -> ParameterSubgroup:
        """Return the subgroup of these parameters.

        slicings: of the parameters that are updated by slices, by number. without: numbers of parameters to leave out.
        """
        own: list[ParameterUpdate] = []
        numbers: list[int] = []
        chosen: list[tuple[int, ...]] = []
        first = 0
        for group, (begin, end) in zip(step.updates, ranges, strict=True):
            chosen.append(tuple(index for index in range(begin, end) if first + index not in without))
            own += [group[index] for index in chosen[-1]]
            numbers += [first + index for index in chosen[-1]]
            first += len(group)
        active = [update for update in own if update.elements]
        parameters = [update.parameter for update in active if update.parameter is not None]
        states = tuple(dict.fromkeys(block for update in active for block in update.states))
        if len(numbers) == 1 and (inside := slicings.get(numbers[0])) is not None:
            return _sliced(ranges, tuple(chosen), numbers[0], active[0], inside)
        return ParameterSubgroup(
            ranges=ranges,
            chosen=tuple(chosen),
            numbers=tuple(numbers),
            dtype=active[0].dtype if active else None,
            read=tuple(dict.fromkeys(block for update in active for block in update.blocks)),
            written=tuple(dict.fromkeys((*parameters, *states))),
            states=states,
            elements=sum(update.elements for update in active),
            temporary_bytes=temporary_bytes(step.optimizer, [(update.device, update.size_bytes) for update in active])
            + casting_bytes([update.master_bytes for update in active]),
            fresh_bytes=sum(update.fresh_bytes + _COUNTERS_BYTES for update in active if update.fresh_bytes),
            movable_fresh_bytes=sum(update.fresh_bytes for update in active if self._can_leave(update.state_bytes)),
        )

    def smallest_budget(self, subgroups: Sequence[ParameterSubgroup]) -> tuple[int, int]:
        """Return the smallest budget that all these subgroups fit in one by one, and the number of the one that needs it.

        It consists of what cannot leave the device, now or once it has been made, and of what one subgroup brings in.
        """
        small = sum(subgroup.fresh_bytes - subgroup.movable_fresh_bytes for subgroup in subgroups)
        own = [_needed_bytes(subgroup) for subgroup in subgroups]
        largest = max(range(len(own)), key=own.__getitem__, default=0)
        return self._immovable_bytes() + small + (own[largest] if own else 0), largest

    # -- how they are cut

    def _subgroups(self, step: PendingStep, cut: _Cut) -> list[ParameterSubgroup]:
        slicings = self._slicings(step, cut.sliced)
        return [self.one(step, ranges, slicings) for ranges in cut.ranges]

    def _choose_bytes(self, step: PendingStep) -> int:
        each = [size for group in step.sizes for size in group]
        return self._sizes.choose(step.optimizer, each, self._room_bytes(), self._pager, others_bytes=self._others_bytes(step))

    def _cut_anew(self, step: PendingStep, subgroup_bytes: int) -> _Cut:
        """Cut between parameters; and into slices inside a parameter, where that saves memory and is possible."""
        sliced = frozenset(self._slicings(step, self._large(step)))
        joined = _joined(step, self._room_bytes()) if self._on_host and subgroup_bytes else frozenset()
        ranges = tuple(cut(step.sizes, subgroup_bytes, alone=sliced, joined=joined))
        return _Cut(sizes=step.sizes, ranges=ranges, sliced=sliced)

    def _large(self, step: PendingStep) -> frozenset[int]:
        """Return the numbers of parameters whose update takes most of the room; none if all fit at once."""
        room = self._room_bytes()
        if room is None:
            return frozenset()
        own = step.in_order
        temporaries = [temporary_bytes(step.optimizer, [(update.device, update.size_bytes)]) for update in own]
        if sum(update.total_bytes for update in own) + max(temporaries, default=0) <= room:
            return frozenset()
        needed = (update.total_bytes + extra if update.elements else 0 for update, extra in zip(own, temporaries, strict=True))
        return frozenset(number for number, size in enumerate(needed) if size > room / 2)

    def _slicings(self, step: PendingStep, numbers: frozenset[int]) -> dict[int, Slicing]:
        """Return how these parameters are cut into slices, by number; without those that cannot be."""
        found = {}
        for owned in step.owned(sorted(numbers)):
            how = slicing(step.optimizer, owned, self._pager, min_moved_bytes=self._min_moved_bytes)
            if how is not None:
                found[owned.number] = how
        return found

    # -- sizes

    def _immovable_bytes(self) -> int:
        return self._pager.unmoved_bytes + sum(block.size_bytes for block in self._pager.blocks if block.span is None)

    def _can_leave(self, size_bytes: int) -> bool:
        return self._pager.can_move and size_bytes >= self._min_moved_bytes

    def _others_bytes(self, step: PendingStep) -> int:
        """Estimate the bytes that other optimizers update, from all gradients, as if they kept the states of this optimizer."""
        own = step.in_order
        gradients = sum(update.gradient.size_bytes for update in own if update.gradient is not None)
        if not gradients:
            return 0
        others = sum(block.size_bytes for block in self._pager.blocks if block.kind == "gradient") - gradients
        return max(others, 0) * sum(update.total_bytes for update in own if update.elements) // gradients

    def _other_states_bytes(self, step: PendingStep) -> int:
        """Estimate the bytes of states that other optimizers will make and that stay on the device: of small parameters."""
        own = {update.gradient for update in step.in_order}
        others = (block for block in self._pager.blocks if block.kind == "gradient" and block not in own)
        return sum(USUAL_STATES * block.size_bytes + _COUNTERS_BYTES for block in others if not self._can_leave(block.size_bytes))

    def _room_bytes(self) -> int | None:
        """Return what the budget leaves for blocks that can leave; None without a budget."""
        budget = self._pager.budget_bytes
        return None if budget is None else budget - self._immovable_bytes()


def _needed_bytes(subgroup: ParameterSubgroup) -> int:
    """Return what the update of the subgroup has on the device and can leave afterwards."""
    movable = sum(block.size_bytes for block in subgroup.read if block.span is not None)
    needed = movable + subgroup.movable_fresh_bytes + subgroup.temporary_bytes
    return max(needed, subgroup.slicing.largest_fresh_bytes if subgroup.slicing is not None else 0)


def _sliced(
    ranges: Ranges, chosen: tuple[tuple[int, ...], ...], number: int, update: ParameterUpdate, inside: Slicing
) -> ParameterSubgroup:
    own = tuple(block for block in (update.parameter, update.gradient) if block is not None)
    return ParameterSubgroup(
        ranges=ranges,
        chosen=chosen,
        numbers=(number,),
        dtype=update.dtype,
        read=own,
        written=own[:1],
        states=update.states,
        elements=update.elements,
        temporary_bytes=inside.workspace_bytes,
        fresh_bytes=0,
        movable_fresh_bytes=0,
        slicing=inside,
    )


def _joined(step: PendingStep, room_bytes: int | None) -> frozenset[int]:
    """Return the numbers of parameters that should be in the subgroup of the one before: their gradients are in one block.

    FSDP reduces the gradients of a group to one storage. Only a subgroup that has all of them can be updated on the host. None
    of a run of such parameters that would take more than half of the room: the next ones have to come in meanwhile.
    """
    joined: set[int] = set()
    run: list[int] = []
    size = 0
    before: Block | None = None
    updates = step.in_order
    for number, update in enumerate((*updates, ParameterUpdate(total_bytes=0))):
        if update.gradient is None or update.gradient is not before:
            if room_bytes is None or _PARTS * size <= room_bytes:
                joined.update(run[1:])
            run, size = [], 0
        run.append(number)
        size, before = size + update.total_bytes, update.gradient
    return frozenset(joined)


def cut(
    sizes: Iterable[Sequence[int]], subgroup_bytes: int, *, alone: Container[int] = (), joined: Container[int] = ()
) -> Iterator[Ranges]:
    """Yield subgroups of about `subgroup_bytes` in the order of the parameters; 0: one parameter each.

    sizes: bytes of each parameter, by group. A subgroup is larger than `subgroup_bytes` only where one parameter is, together
    with small ones before it. alone: numbers of parameters that are a subgroup by themselves. joined: numbers of parameters that
    are in the subgroup of the one before.
    """
    groups = list(sizes)
    begins = [0] * len(groups)
    ends = [0] * len(groups)
    size = number = 0
    for index, group in enumerate(groups):
        for parameter_bytes in group:
            full = size + parameter_bytes > subgroup_bytes and 2 * size >= subgroup_bytes
            apart = number in alone or number - 1 in alone
            together = number in joined
            number += 1
            if (apart or (full and not together)) and begins != ends:
                yield tuple(zip(begins, ends, strict=True))
                begins, size = list(ends), 0
            ends[index] += 1
            size += parameter_bytes
    if begins != ends:
        yield tuple(zip(begins, ends, strict=True))
