"""Cuts the parameters of an optimizer into subgroups that are updated one after the other, and says what each one needs.

How large they are follows from the links, which are measured when their tiers are opened: [Note: The size of subgroups].
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import groupby
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import Parameter

from planner import Hardware, Station, stations_of_step, subgroup_bytes
from planner.errors import BudgetError
from planner.problem import SLICES_SHARE
from planner.schema import WaitingTier
from planner.subgroup_size import UNMEASURED_BYTES, largest_subgroup_bytes
from runtime.device import MIN_MOVED_BYTES
from runtime.paging import Block, Pager
from runtime.storage import ALIGNMENT_BYTES
from teraio.distributed import rank_count
from teraio.optimizer.arithmetic import Replica, copied, has_elements_of, update_replicas
from teraio.optimizer.facts import USUAL_STATES, OptimizerFacts, OwnedParameter, cut, moves

logger = logging.getLogger("teraio")

# The smallest parameter that moves, with gradient and the two states of Adam. Smaller subgroups would move nothing earlier.
MIN_SUBGROUP_BYTES = 4 * MIN_MOVED_BYTES
# What a subgroup costs however small it is: Python, the launch of its kernels, the pager's search through all blocks. Measured
# were 25 µs (SGD) to 110 µs (Adafactor, Muon) for Python and the launch. A step over 16 GB at 25 GB/s takes at most 2 % longer by
# this figure than by the right one, be that 100 µs or 1 ms: the size grows with its square root.
UPDATE_SECONDS = 200e-6


@dataclass(eq=False)
class SubgroupSizes:
    """Chooses the size once, for all optimizers of a run. It stays the same in all iterations, since a plan depends on it.

    hardware: returns the measured links. used_bytes: the size, given if a given plan was made for it; None before it is chosen.
    min_bytes: the smallest size to choose.
    """

    hardware: Callable[[], Hardware] | None = None
    _: KW_ONLY
    used_bytes: int | None = None
    min_bytes: int = MIN_SUBGROUP_BYTES

    @property
    def subgroup_bytes(self) -> int:
        """Bytes of parameters, gradients and states to update together at most."""
        # If none was chosen, all are one subgroup; that must not decide for optimizers that come later.
        return self.used_bytes or self.min_bytes

    def choose(self, sizes: Sequence[int], room_bytes: int | None, *, others_bytes: int = 0) -> int:
        """Choose the size if that is possible and has not been done yet. Return `subgroup_bytes`.

        sizes: bytes of each parameter of the optimizer, with gradient and states. others_bytes: the same for all parameters of
        other optimizers together. room_bytes: what the budget leaves for blocks that can leave; None without a budget.
        """
        if self.used_bytes is None and sum(sizes) > self.min_bytes and len(sizes) > 1:
            self.used_bytes = self._best(sum(sizes) + others_bytes, room_bytes)
        return self.subgroup_bytes

    def _best(self, total_bytes: int, room_bytes: int | None) -> int:
        """Return the size by [Note: The size of subgroups]; a usual one without a budget, the largest without known links."""
        if room_bytes is None:
            return UNMEASURED_BYTES
        hardware = self.hardware() if self.hardware is not None else None
        stations: tuple[Station, ...] = ()
        if hardware is not None:
            # Most states wait in the host tier if there is room for all of them, and there is one.
            tiers: list[WaitingTier] = ["host", "storage"] if hardware.host_memory_bytes >= total_bytes else ["storage", "host"]
            if found := [tier for tier in tiers if hardware.link(tier, "device") is not None]:
                stations = stations_of_step(hardware, found[0], update_seconds=UPDATE_SECONDS)
        limits = {"smallest_bytes": self.min_bytes, "largest_bytes": largest_subgroup_bytes(room_bytes)}
        best = subgroup_bytes(stations, total_bytes=total_bytes, **limits)
        basis = "chosen from measured rates" if stations else "a default, as no rate was measured"
        logger.info("optimizers are updated in subgroups of about %s bytes (%s)", f"{best:,}", basis)
        return best


# -- updates by slices, see [Note: Updates by slices] in `teraio.optimizer.subgroup_steps`

# Slices of the states that are on the device at once: one that is updated, two that are read, one that is written back.
SLICE_BUFFERS = 4
_MAX_SLICE_BYTES = 32 << 20
_SLICE_COUNTERS_BYTES = 1024  # bytes reserved for the counters of two slices
# Elements of the scratch parameter that tells which states an optimizer makes. No counter has as many elements.
_TRIED_ELEMENTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """How the update of one parameter is cut: into slices of `slice_elements`, the last one shorter.

    elements: of the parameter. states: names and types of the states that have one element for each of the parameter's.
    fresh: names of those states that the update makes first. buffer_bytes: of all slices of states that are on the device at
    once. temporary_bytes: what the update of one slice allocates.
    """

    elements: int
    slice_elements: int
    states: dict[str, torch.dtype]
    fresh: frozenset[str]
    buffer_bytes: int
    temporary_bytes: int

    @property
    def workspace_bytes(self) -> int:
        """What the update needs on the device besides parameter and gradient."""
        return self.buffer_bytes + self.temporary_bytes

    @property
    def fresh_sizes(self) -> list[int]:
        """Bytes of each state that is made first. They are in the lower tiers; each is on the device for a moment before."""
        return [self.elements * self.states[name].itemsize for name in self.fresh]


def slicing(facts: OptimizerFacts, owned: OwnedParameter, pager: Pager) -> Slicing | None:
    """Return how to cut the update of a parameter into slices; None if that is not possible, or the parameter is too small.

    Reads no data and makes no state.
    """
    parameter, gradient = owned.tensor, owned.tensor.grad
    if gradient is None or not pager.can_move or type(parameter) not in (Tensor, Parameter):
        return None
    if rank_count() > 1 and parameter.itemsize < 4:  # slices may round differently, see [Note: Several ranks]
        return None
    if not facts.elementwise or facts.keeps_masters:
        return None
    state = facts.optimizer.state.get(parameter) or {}
    if not _fills_its_strides(parameter) or not _is_like(gradient, parameter) or gradient.dtype is not parameter.dtype:
        return None
    if not all(_can_be_cut(value, parameter, pager) for value in state.values()):
        return None
    states = _states_after(facts, owned)
    fresh = frozenset(name for name in states if not has_elements_of(state.get(name), parameter))
    itemsize = sum(dtype.itemsize for dtype in states.values())

    def needed(elements: int) -> tuple[int, int]:
        """Return the bytes of buffers and of temporaries. Fresh states count twice: as made by the update, and as copies."""
        buffers = SLICE_BUFFERS * itemsize * elements + (ALIGNMENT_BYTES if states else 0)
        temporaries = facts.temporary_copies * elements * parameter.itemsize
        return buffers, temporaries + (itemsize * elements if fresh else 0) + (_SLICE_COUNTERS_BYTES if states else 0)

    elements = 1 << (_MAX_SLICE_BYTES // parameter.itemsize).bit_length() - 1
    while elements >= ALIGNMENT_BYTES and SLICES_SHARE * sum(needed(elements)) > parameter.nbytes:
        elements //= 2
    if elements < ALIGNMENT_BYTES:  # fewer elements are not whole pages for every element size
        return None
    buffer_bytes, temporaries = needed(elements)
    return Slicing(
        elements=parameter.numel(),
        slice_elements=elements,
        states=states,
        fresh=fresh,
        buffer_bytes=buffer_bytes,
        temporary_bytes=temporaries,
    )


def _fills_its_strides(tensor: Tensor) -> bool:
    """Return whether the tensor's elements fill the beginning of its storage, each once, so that it can be viewed as flat."""
    dense = tensor.layout is torch.strided and torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    return dense and tensor.storage_offset() == 0


def _is_like(tensor: Tensor, parameter: Tensor) -> bool:
    same = tensor.layout is torch.strided and tensor.shape == parameter.shape and tensor.stride() == parameter.stride()
    return same and tensor.device == parameter.device and tensor.storage_offset() == 0


def _can_be_cut(state: object, parameter: Tensor, pager: Pager) -> bool:
    """Return whether a state is a number, a small tensor, or a block of its own that can leave and has the parameter's layout."""
    if not isinstance(state, Tensor):
        return state is None or isinstance(state, (bool, int, float))
    if not has_elements_of(state, parameter):
        return not moves(state.nbytes)  # it is copied for each slice
    block = pager.known_block(state)
    return _is_like(state, parameter) and block is not None and block.span is not None and block.size_bytes == state.nbytes


def _states_after(facts: OptimizerFacts, owned: OwnedParameter) -> dict[str, torch.dtype]:
    """Return the elementwise states that the next update leaves, found out by an update of a tiny parameter.

    Reads no data except counters, of which it has copies.
    """
    parameter = owned.tensor
    tried = torch.zeros(_TRIED_ELEMENTS, dtype=parameter.dtype, device=parameter.device)
    tried.grad = torch.zeros_like(tried)
    state = {
        name: torch.zeros_like(tried, dtype=value.dtype) if has_elements_of(value, parameter) else copied(value)
        for name, value in (facts.optimizer.state.get(parameter) or {}).items()
    }
    update_replicas(facts, [Replica(group=owned.group, parameter=tried, state=state)])
    return {name: value.dtype for name, value in state.items() if has_elements_of(value, tried)}


# -- subgroups

_COUNTERS_BYTES = 16  # bytes reserved for a parameter's step counter and similar scalars

_PARTS = 2  # parameters whose gradients are in one block are one subgroup if they take at most the room divided by this


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterUpdate:
    """What the update of one parameter touches. Without a gradient it touches nothing, and `elements` is 0.

    total_bytes: of parameter, gradient and states, also without a gradient.
    fresh_bytes: of the states that this update makes first. largest_fresh_bytes: of the largest tensor of them.
    """

    total_bytes: int
    elements: int = 0
    fresh_bytes: int = 0
    largest_fresh_bytes: int = 0
    parameter: Block | None = None
    gradient: Block | None = None
    states: tuple[Block, ...] = ()

    @property
    def blocks(self) -> Iterator[Block]:
        """All its blocks."""
        return (b for b in (self.parameter, self.gradient, *self.states) if b is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingStep:
    """A step that is about to run. Keeps the parameters alive: for the length of the step only.

    updates: what the update of each parameter touches, by number.
    """

    facts: OptimizerFacts
    parameters: tuple[OwnedParameter, ...]
    updates: tuple[ParameterUpdate, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """`total_bytes` of all updates."""
        return tuple(update.total_bytes for update in self.updates)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSubgroup:
    """Parameters that are updated together: which they are, and what their update needs.

    numbers: among all parameters of the optimizer. dtype: of the first of them.
    read, written, states: blocks. elements: of all its parameters.
    temporary_bytes: what the update allocates while it runs. fresh_bytes: of the states that it makes first.
    movable_fresh_bytes: of those fresh states that can leave the device.
    slicing: how the update of its only parameter is cut into slices, None if it is not. If it is, `states` are not among
    `read`, and states that are made first are not among `fresh_bytes`.
    """

    numbers: tuple[int, ...]
    dtype: torch.dtype | None
    read: tuple[Block, ...]
    written: tuple[Block, ...]
    states: tuple[Block, ...]
    elements: int
    temporary_bytes: int
    fresh_bytes: int
    movable_fresh_bytes: int
    slicing: Slicing | None

    @property
    def workspace_bytes(self) -> int:
        """What must be free on the device besides the blocks."""
        return self.temporary_bytes + self.fresh_bytes

    @property
    def made_bytes(self) -> int:
        """Bytes of all states that the update makes first, on the device or in the lower tiers."""
        return self.fresh_bytes + (sum(self.slicing.fresh_sizes) if self.slicing is not None else 0)

    @property
    def needed_bytes(self) -> int:
        """What the update has on the device and can leave afterwards."""
        movable = sum(block.size_bytes for block in self.read if block.span is not None)
        needed = movable + self.movable_fresh_bytes + self.temporary_bytes
        return max(needed, *(self.slicing.fresh_sizes if self.slicing is not None else ()), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """How the parameters were cut, and the sizes that they had then. sliced: numbers of those that are updated by slices."""

    sizes: tuple[int, ...]
    subgroups: tuple[range, ...]
    sliced: frozenset[int]


class Subgroups:
    """The subgroups of one optimizer: the same in every iteration, as long as its parameters and the budget stay the same.

    Keeps neither the optimizer nor a parameter alive. on_host: whether subgroups may be updated on the host, so that gradients in
    one block should be in one subgroup.
    """

    def __init__(self, pager: Pager, sizes: SubgroupSizes, *, on_host: bool) -> None:
        self._pager = pager
        self._on_host = on_host
        self._sizes = sizes
        self._cut: _Cut | None = None

    def of(self, step: PendingStep) -> list[ParameterSubgroup]:
        """Return the subgroups in order. If one does not fit any more, cut all again, one parameter each.

        Raises BudgetError if even then the update of one parameter does not fit.
        """
        known = self._cut
        if known is None or known.sizes != step.sizes:
            size = self._sizes.choose(step.sizes, self._room_bytes(), others_bytes=self._others_bytes(step))
            known = self._cut_again(step, size)
        subgroups = self._subgroups(step, known)
        budget = self._pager.account.budget_bytes
        if budget is not None and self.smallest_budget(subgroups)[0] > budget:
            known = self._cut_again(step, 0)
            subgroups = self._subgroups(step, known)
            needed, number = self.smallest_budget(subgroups)
            if needed > budget:
                needed += self._other_states_bytes(step)
                raise BudgetError(smallest_bytes=needed, budget_bytes=budget, stage=f"optimizer/subgroup.{number}")
        self._cut = known
        return subgroups

    def one(
        self, step: PendingStep, numbers: Sequence[int], slicings: Mapping[int, Slicing] = MappingProxyType({})
    ) -> ParameterSubgroup:
        """Return the subgroup of these parameters. slicings: of the parameters that are updated by slices, by number."""
        touched = [number for number in numbers if step.updates[number].elements]
        active = [step.updates[number] for number in touched]
        slices = slicings.get(numbers[0]) if len(numbers) == 1 else None
        states = tuple(dict.fromkeys(block for update in active for block in update.states))
        stay_away = states if slices is not None else ()
        parameters = [update.parameter for update in active if update.parameter is not None]
        tensors = [step.parameters[number].tensor for number in touched]
        fresh = [update for update in active if update.fresh_bytes] if slices is None else []
        return ParameterSubgroup(
            numbers=tuple(numbers),
            dtype=tensors[0].dtype if tensors else None,
            read=tuple(dict.fromkeys(block for update in active for block in update.blocks if block not in stay_away)),
            written=tuple(dict.fromkeys((*parameters, *(states if slices is None else ())))),
            states=states,
            elements=sum(update.elements for update in active),
            temporary_bytes=step.facts.temporary_bytes(tensors) if slices is None else slices.workspace_bytes,
            fresh_bytes=sum(update.fresh_bytes + _COUNTERS_BYTES for update in fresh),
            movable_fresh_bytes=sum(update.fresh_bytes for update in fresh if self._can_leave(update.largest_fresh_bytes)),
            slicing=slices,
        )

    def smallest_budget(self, subgroups: Sequence[ParameterSubgroup]) -> tuple[int, int]:
        """Return the smallest budget that all these subgroups fit in one by one, and the number of the one that needs it.

        It consists of what cannot leave the device, now or once it has been made, and of what one subgroup brings in.
        """
        small = sum(subgroup.fresh_bytes - subgroup.movable_fresh_bytes for subgroup in subgroups)
        own = [subgroup.needed_bytes for subgroup in subgroups]
        largest = max(range(len(own)), key=own.__getitem__, default=0)
        return self._immovable_bytes() + small + (own[largest] if own else 0), largest

    # -- how they are cut

    def _subgroups(self, step: PendingStep, cut: _Cut) -> list[ParameterSubgroup]:
        slicings = self._slicings(step, cut.sliced)
        return [self.one(step, numbers, slicings) for numbers in cut.subgroups]

    def _cut_again(self, step: PendingStep, subgroup_bytes: int) -> _Cut:
        """Cut between parameters; and into slices inside a parameter, where that saves memory and is possible."""
        sliced = frozenset(self._slicings(step, self._large(step)))
        joined = _joined(step, self._room_bytes()) if self._on_host and subgroup_bytes else frozenset()
        return _Cut(
            sizes=step.sizes, subgroups=tuple(cut(step.sizes, subgroup_bytes, alone=sliced, joined=joined)), sliced=sliced
        )

    def _large(self, step: PendingStep) -> frozenset[int]:
        """Return the numbers of parameters whose update takes most of the room; none if all fit at once."""
        room = self._room_bytes()
        if room is None:
            return frozenset()
        updated = [owned for owned in step.parameters if step.updates[owned.number].elements]
        temporaries = {owned.number: step.facts.temporary_bytes([owned.tensor]) for owned in updated}
        if sum(step.sizes) + max(temporaries.values(), default=0) <= room:
            return frozenset()
        return frozenset(number for number, more in temporaries.items() if step.sizes[number] + more > room / 2)

    def _slicings(self, step: PendingStep, numbers: frozenset[int]) -> dict[int, Slicing]:
        """Return how these parameters are cut into slices, by number; without those that cannot be."""
        found = {number: slicing(step.facts, step.parameters[number], self._pager) for number in sorted(numbers)}
        return {number: how for number, how in found.items() if how is not None}

    # -- sizes

    def _immovable_bytes(self) -> int:
        return self._pager.account.unmoved_bytes + sum(block.size_bytes for block in self._pager.blocks if block.span is None)

    def _can_leave(self, size_bytes: int) -> bool:
        return self._pager.can_move and moves(size_bytes)

    def _others_bytes(self, step: PendingStep) -> int:
        """Estimate the bytes that other optimizers update, from all gradients, as if they kept the states of this optimizer."""
        gradients = sum(update.gradient.size_bytes for update in step.updates if update.gradient is not None)
        if not gradients:
            return 0
        others = sum(block.size_bytes for block in self._pager.blocks if block.kind == "gradient") - gradients
        return max(others, 0) * sum(update.total_bytes for update in step.updates if update.elements) // gradients

    def _other_states_bytes(self, step: PendingStep) -> int:
        """Estimate the bytes of states that other optimizers will make and that stay on the device: of small parameters."""
        own = {update.gradient for update in step.updates}
        others = (block for block in self._pager.blocks if block.kind == "gradient" and block not in own)
        return sum(USUAL_STATES * block.size_bytes + _COUNTERS_BYTES for block in others if not self._can_leave(block.size_bytes))

    def _room_bytes(self) -> int | None:
        """Return what the budget leaves for blocks that can leave; None without a budget."""
        budget = self._pager.account.budget_bytes
        return None if budget is None else budget - self._immovable_bytes()


def _joined(step: PendingStep, room_bytes: int | None) -> frozenset[int]:
    """Return the numbers of parameters that should be in the subgroup of the one before: their gradients are in one block."""
    # FSDP reduces the gradients of a group to one storage. Only a subgroup that has all of them can be updated on the host.
    joined: set[int] = set()
    for gradient, found in groupby(range(len(step.updates)), key=lambda number: step.updates[number].gradient):
        run = list(found)
        size = sum(step.updates[number].total_bytes for number in run)
        # The next ones have to come in meanwhile.
        if gradient is not None and (room_bytes is None or _PARTS * size <= room_bytes):
            joined.update(run[1:])
    return frozenset(joined)
