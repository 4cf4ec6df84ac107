"""Updates of parameters whose states are never on the device as a whole: they pass through it in slices.

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

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from planner.errors import StorageError
from planner.problem import SLICES_SHARE
from runtime.paging import Block, Pager
from runtime.storage import ALIGNMENT_BYTES, RangeCopy, align_up, in_turns
from runtime.system import annotate
from teraio.distributed import rank_count
from teraio.optimizer.arithmetic import Replica, copied, has_elements_of, update_replicas
from teraio.optimizer.facts import OptimizerFacts, OwnedParameter, moves

# Slices of the states that are on the device at once: one that is updated, two that are read, one that is written back.
_BUFFERS = 4
_READ_AHEAD = 2  # slices that are read ahead while one is updated
_MAX_SLICE_BYTES = 32 << 20
_COUNTERS_BYTES = 1024  # bytes reserved for the counters of two slices
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


# -- what can be cut


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
        buffers = _BUFFERS * itemsize * elements + (ALIGNMENT_BYTES if states else 0)
        temporaries = facts.temporary_copies * elements * parameter.itemsize
        return buffers, temporaries + (itemsize * elements if fresh else 0) + (_COUNTERS_BYTES if states else 0)

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


# -- the update


@contextmanager
def lent_slices(
    pager: Pager, facts: OptimizerFacts, owned: OwnedParameter, plan: Slicing, stage: str, block_name: Callable[[str], str]
) -> Iterator[SlicedUpdate]:
    """Give the update of one parameter by slices; within, the pager lends its states. States that do not exist are made.

    stage: name of the stage, for errors. block_name: returns the name of a state's block. Waits until all states are in the lower
    tiers. Raises StorageError if a copy failed, and BudgetError if a new state does not fit.
    """
    states: dict[str, tuple[Tensor, Block]] = {}
    with ExitStack() as lent:
        for name, dtype in plan.states.items():
            if name in plan.fresh:
                tensor = _make(pager, owned.tensor, dtype, block_name(name), stage)
            else:
                tensor = facts.optimizer.state[owned.tensor][name]
            block = pager.known_block(tensor)
            if block is None:
                raise StorageError("a state is updated by slices but is no block; this is a bug in teraio, please report it")
            pager.lending.lend([block])
            lent.callback(pager.lending.give_back, [block])
            states[name] = tensor, block
        yield SlicedUpdate(pager, facts, owned, plan, states)


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
        blocks = {name: block for name, (_, block) in self.states.items()}
        try:
            with _Ring(self.pager, self.owned.tensor.device, self.plan, blocks) as ring:
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
    """Buffers for _BUFFERS slices of all states, and the copies from and to them. On leaving it, all copies have ended."""

    def __init__(self, pager: Pager, device: torch.device, plan: Slicing, blocks: dict[str, Block]) -> None:
        self._pager = pager
        self._plan = plan
        self._blocks = blocks
        self._reading: dict[int, list[RangeCopy]] = {}
        self._writing: dict[int, list[RangeCopy]] = {}
        self._memory = torch.empty(plan.buffer_bytes, dtype=torch.uint8, device=device)
        self._first = -self._memory.data_ptr() % ALIGNMENT_BYTES  # drives are read past the page cache into whole pages

    def __enter__(self) -> _Ring:
        return self

    def __exit__(self, *_: object) -> None:
        for copies in (*self._reading.values(), *self._writing.values()):  # copies run here only after an error, which says why
            for copy in copies:
                with suppress(StorageError):
                    copy()
        self._memory = torch.empty(0, dtype=torch.uint8)  # the traceback of an error would keep it

    def read(self, number: int, begin: int) -> None:
        """Begin to read a slice. Waits until the slice before it in the same buffers is written."""
        _wait(self._writing, number - _BUFFERS)
        copies = self._reading[number] = []  # there before the first copy begins: if the next one fails, somebody waits for it
        for name, dtype in self._plan.states.items():
            if name not in self._plan.fresh:
                memory = self._bytes(number, begin, name)
                copies.append(self._pager.lending.copy_range(self._blocks[name], begin * dtype.itemsize, memory, to_slot=False))

    def take(self, number: int, begin: int) -> dict[str, Tensor]:
        """Return the slices of all states. Waits until they are read."""
        _wait(self._reading, number)
        length = self._length(begin)
        return {name: self._bytes(number, begin, name).view(dtype)[:length] for name, dtype in self._plan.states.items()}

    def write(self, number: int, begin: int) -> None:
        """Begin to write a slice."""
        copies = self._writing[number] = []
        for name, dtype in self._plan.states.items():
            memory = self._bytes(number, begin, name)
            copies.append(self._pager.lending.copy_range(self._blocks[name], begin * dtype.itemsize, memory, to_slot=True))

    def finish(self) -> None:
        """Wait until all slices are written."""
        for number in list(self._writing):
            _wait(self._writing, number)

    def _length(self, begin: int) -> int:
        return min(self._plan.slice_elements, self._plan.elements - begin)

    def _bytes(self, number: int, begin: int, name: str) -> Tensor:
        """Return the buffer of a state's slice, in whole pages."""
        names = list(self._plan.states)
        before = sum(self._plan.states[other].itemsize for other in names[: names.index(name)])
        itemsize = self._plan.states[name].itemsize
        offset = self._first + self._plan.slice_elements * (_BUFFERS * before + number % _BUFFERS * itemsize)
        return self._memory[offset : offset + align_up(self._length(begin) * itemsize)]


def _wait(copies: dict[int, list[RangeCopy]], number: int) -> None:
    """Wait for the copies of slice `number`, if there are any, and forget them."""
    with annotate("wait", "for copies of a slice"):
        for copy in copies.get(number, ()):
            copy()
    copies.pop(number, None)


def _flat(tensor: Tensor, begin: int, length: int) -> Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,), 0)[begin : begin + length]
