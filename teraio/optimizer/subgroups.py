"""Cuts the parameters of an optimizer into parts that are updated one after the other, and says what each part needs."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.optim import Optimizer

from planner.errors import BudgetError
from runtime.device import MIN_MOVED_BYTES
from runtime.paging import Block, Pager
from teraio.optimizer.capabilities import bytes_of, keeps_masters, states_per_parameter, temporary_bytes
from teraio.optimizer.masters import casting_bytes, lacks_master, master_bytes
from teraio.optimizer.slicing import Slicing, slicing
from teraio.optimizer.states import OptimizerStates
from teraio.optimizer.subgroup_sizes import MIN_SUBGROUP_BYTES, SubgroupSizes

_COUNTERS_BYTES = 16
"""Of a parameter's step counter and the like."""

Slices = tuple[tuple[int, int], ...]
"""A part: from where to where in each group's parameters. Holds no parameter, so that optimizers can be collected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What the update of one parameter touches; nothing if it has no gradient.

    fresh_bytes: of the states that it makes first. part_bytes: parameter, gradient and states, also without a gradient.
    size_bytes: of what is updated, the parameter or its master. master_bytes: of the latter, 0 if there is none.
    """

    part_bytes: int
    size_bytes: int = 0
    master_bytes: int = 0
    device: str = "cpu"
    dtype: torch.dtype | None = None
    elements: int = 0
    fresh_bytes: int = 0
    parameter: Block | None = None
    gradient: Block | None = None
    states: tuple[Block, ...] = ()

    @property
    def blocks(self) -> Iterator[Block]:
        """All blocks that there are of it."""
        return (b for b in (self.parameter, self.gradient, *self.states) if b is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Parameters that are updated together: where they are, their numbers, and what their update needs.

    slices: the part of all parameters that they are from; chosen: their numbers within each group. dtype: of the first one.

    temporary_bytes: for as long as it runs. fresh_bytes: of the states that it makes first, those that can leave
    (`movable_fresh_bytes`) among them.
    slicing: how the update of its only parameter is cut, None if it is not. Then `states` are not among `read`, nor are those
    that are made among `fresh_bytes`.
    """

    slices: Slices
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
        """What must be free besides the blocks."""
        return self.temporary_bytes + self.fresh_bytes

    @property
    def made_bytes(self) -> int:
        """Of all states that it makes first, wherever they will be."""
        return self.fresh_bytes + (self.slicing.fresh_bytes if self.slicing is not None else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """How an optimizer's parameters were cut, and the sizes that they had. sliced: numbers of those that are cut inside."""

    sizes: tuple[tuple[int, ...], ...]
    cut: tuple[Slices, ...]
    sliced: frozenset[int]


class OptimizerParts:
    """Cuts optimizers so that each part fits, the same in every iteration as long as their parameters stay the same."""

    def __init__(self, pager: Pager, states: OptimizerStates, sizes: SubgroupSizes | None = None) -> None:
        self._pager = pager
        self._states = states
        self._sizes = sizes or SubgroupSizes()
        self._cuts: weakref.WeakKeyDictionary[Optimizer, _Cut] = weakref.WeakKeyDictionary()

    def updates(self, optimizer: Optimizer) -> list[list[Update]]:
        """Of all parameters, by group. What they touch becomes blocks: before a region begins, or it would count twice."""
        states, masters = states_per_parameter(optimizer), keeps_masters(optimizer)
        numbers = iter(range(sum(len(group["params"]) for group in optimizer.param_groups)))
        return [
            [self._update(optimizer, next(numbers), p, states, masters) for p in group["params"]]
            for group in optimizer.param_groups
        ]

    def parts(self, optimizer: Optimizer, updates: list[list[Update]]) -> list[Part]:
        """The parts in order. Where one does not fit any more, all are cut anew, as fine as can be.

        Raises BudgetError if even then the update of one parameter does not fit.
        """
        sizes = tuple(tuple(update.part_bytes for update in group) for group in updates)
        known = self._cuts.get(optimizer)
        if known is None or known.sizes != sizes:
            each = [size for group in sizes for size in group]
            others = self._others_bytes([update for group in updates for update in group])
            part_bytes = self._sizes.choose(optimizer, each, self._room_bytes(), self._pager, others_bytes=others)
            known = self._cut(optimizer, updates, part_bytes)
        parts = self._parts(optimizer, updates, known)
        budget = self._pager.budget_bytes
        if budget is not None and self.largest(parts)[0] > budget:
            known = self._cut(optimizer, updates, 0)
            parts = self._parts(optimizer, updates, known)
            needed, number = self.largest(parts)
            if needed > budget:
                raise BudgetError(smallest_bytes=needed, budget_bytes=budget, stage=f"optimizer/subgroup.{number}")
        self._cuts[optimizer] = known
        return parts

    def whole(self, optimizer: Optimizer, updates: list[list[Update]]) -> Part:
        """All parameters as one part."""
        return self.part(optimizer, updates, tuple((0, len(group)) for group in updates))

    def _parts(self, optimizer: Optimizer, updates: list[list[Update]], known: _Cut) -> list[Part]:
        slicings = self._slicings(optimizer, known.sliced)
        return [self.part(optimizer, updates, slices, slicings) for slices in known.cut]

    def _cut(self, optimizer: Optimizer, updates: list[list[Update]], part_bytes: int) -> _Cut:
        """Cut all, inside parameters as well where that is worth it and can be done."""
        sliced = frozenset(self._slicings(optimizer, self._large(optimizer, updates)))
        return _Cut(
            sizes=tuple(tuple(update.part_bytes for update in group) for group in updates),
            cut=tuple(cut(updates, part_bytes, alone=sliced)),
            sliced=sliced,
        )

    def _large(self, optimizer: Optimizer, updates: list[list[Update]]) -> frozenset[int]:
        """Numbers of the parameters whose update takes most of the room, unless there is room for all of them at once."""
        room = self._room_bytes()
        if room is None:
            return frozenset()
        own = [update for group in updates for update in group]
        temporaries = [temporary_bytes(optimizer, [(update.device, update.size_bytes)]) for update in own]
        if sum(update.part_bytes for update in own) + max(temporaries, default=0) <= room:
            return frozenset()
        needed = (update.part_bytes + extra if update.elements else 0 for update, extra in zip(own, temporaries, strict=True))
        return frozenset(number for number, size in enumerate(needed) if size > room / 2)

    def _slicings(self, optimizer: Optimizer, numbers: frozenset[int]) -> dict[int, Slicing]:
        """How those of the parameters are cut that can be."""
        if not numbers:
            return {}
        parameters = [(place, p) for place, group in enumerate(optimizer.param_groups) for p in group["params"]]
        found = {number: slicing(optimizer, *parameters[number], self._pager) for number in sorted(numbers)}
        return {number: each for number, each in found.items() if each is not None}

    def part(
        self,
        optimizer: Optimizer,
        updates: list[list[Update]],
        slices: Slices,
        slicings: Mapping[int, Slicing] = MappingProxyType({}),
        *,
        without: Collection[int] = (),
    ) -> Part:
        """What a part touches and needs. slicings: of the parameters that are cut inside, by number. without: numbers of
        parameters that it leaves out."""
        own: list[Update] = []
        numbers: list[int] = []
        chosen: list[tuple[int, ...]] = []
        first = 0
        for group, (begin, end) in zip(updates, slices, strict=True):
            chosen.append(tuple(number for number in range(begin, end) if first + number not in without))
            own += [group[number] for number in chosen[-1]]
            numbers += [first + number for number in chosen[-1]]
            first += len(group)
        active = [update for update in own if update.elements]
        parameters = [update.parameter for update in active if update.parameter is not None]
        states = tuple(dict.fromkeys(block for update in active for block in update.states))
        if len(numbers) == 1 and (inside := slicings.get(numbers[0])) is not None:
            return _sliced_part(slices, tuple(chosen), numbers[0], active[0], inside)
        return Part(
            slices=slices,
            chosen=tuple(chosen),
            dtype=active[0].dtype if active else None,
            numbers=tuple(numbers),
            read=tuple(dict.fromkeys(block for update in active for block in update.blocks)),
            written=tuple(dict.fromkeys((*parameters, *states))),
            states=states,
            elements=sum(update.elements for update in active),
            temporary_bytes=temporary_bytes(optimizer, [(update.device, update.size_bytes) for update in active])
            + casting_bytes([update.master_bytes for update in active]),
            fresh_bytes=sum(update.fresh_bytes + _COUNTERS_BYTES for update in active if update.fresh_bytes),
            movable_fresh_bytes=sum(update.fresh_bytes for update in active if self._leaves(update.size_bytes)),
        )

    def largest(self, parts: Sequence[Part]) -> tuple[int, int]:
        """The smallest budget that the update of all `parts` one by one fits in, and the part that needs it.

        That is what cannot leave, now or once it has been made, and what the part itself brings in.
        """
        small = sum(part.fresh_bytes - part.movable_fresh_bytes for part in parts)
        stays = self._stuck_bytes() + small
        own = [
            sum(block.size_bytes for block in part.read if block.span is not None)
            + part.movable_fresh_bytes
            + part.temporary_bytes
            for part in parts
        ]
        own = [max(size, part.slicing.largest_fresh_bytes if part.slicing else 0) for size, part in zip(own, parts, strict=True)]
        largest = max(range(len(parts)), key=own.__getitem__, default=0)
        return stays + (own[largest] if own else 0), largest

    def _stuck_bytes(self) -> int:
        return self._pager.unmoved_bytes + sum(block.size_bytes for block in self._pager.blocks if block.span is None)

    def _leaves(self, size_bytes: int) -> bool:
        return self._pager.can_move and size_bytes >= MIN_MOVED_BYTES

    @property
    def part_bytes(self) -> int:
        """Of parameters, gradients and states that are updated together, at most: what the first steps were cut by."""
        return self._sizes.used_bytes or MIN_SUBGROUP_BYTES

    def _others_bytes(self, own: Sequence[Update]) -> int:
        """Of what other optimizers update, by the gradients that there are, as if they kept what this one does."""
        gradients = sum(update.gradient.size_bytes for update in own if update.gradient is not None)
        if not gradients:
            return 0
        others = sum(block.size_bytes for block in self._pager.blocks if block.kind == "gradient") - gradients
        return max(others, 0) * sum(update.part_bytes for update in own if update.elements) // gradients

    def _room_bytes(self) -> int | None:
        """What the budget leaves for blocks that can leave; None where nothing limits it."""
        budget = self._pager.budget_bytes
        return None if budget is None else budget - self._stuck_bytes()

    def _update(self, optimizer: Optimizer, number: int, parameter: torch.Tensor, states: int, masters: bool) -> Update:
        size = bytes_of(parameter)
        master = master_bytes(parameter) if masters else 0
        updated = master or size
        part_bytes = 2 * size + states * updated + master
        gradient = parameter.grad
        if gradient is None:
            return Update(part_bytes=part_bytes)
        dense = gradient.layout is torch.strided
        fresh_master = master if lacks_master(optimizer, parameter) else 0
        return Update(
            part_bytes=part_bytes,
            size_bytes=updated,
            master_bytes=master,
            device=parameter.device.type,
            dtype=parameter.dtype,
            elements=parameter.numel(),
            fresh_bytes=fresh_master + (0 if self._states.exist(optimizer, parameter) else states * updated),
            parameter=self._block(parameter, f"optimizer/parameter.{number}", "parameter"),
            gradient=self._block(gradient, f"optimizer/gradient.{number}", "gradient") if dense else None,
            states=tuple(self._states.blocks(optimizer, number, parameter)),
        )

    def _block(self, tensor: torch.Tensor, name: str, kind: str) -> Block:
        return self._pager.block_of(tensor, name=name, kind=kind, user_visible=True)


def _sliced_part(slices: Slices, chosen: tuple[tuple[int, ...], ...], number: int, update: Update, inside: Slicing) -> Part:
    own = tuple(block for block in (update.parameter, update.gradient) if block is not None)
    return Part(
        slices=slices,
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


def cut(updates: Iterable[Sequence[Update]], part_bytes: int, *, alone: Container[int] = ()) -> Iterator[Slices]:
    """Parts of about `part_bytes` in the order of the parameters: never more, but for a parameter that is larger by itself
    and small ones before it. 0: one parameter each. alone: numbers of parameters that have a part of their own.
    """
    groups = list(updates)
    begins = [0] * len(groups)
    ends = [0] * len(groups)
    size = number = 0
    for index, group in enumerate(groups):
        for update in group:
            full = size + update.part_bytes > part_bytes and 2 * size >= part_bytes
            apart = number in alone or number - 1 in alone
            number += 1
            if (full or apart) and begins != ends:
                yield tuple(zip(begins, ends, strict=True))
                begins, size = list(ends), 0
            ends[index] += 1
            size += update.part_bytes
    if begins != ends:
        yield tuple(zip(begins, ends, strict=True))
