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

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from planner.errors import StorageError
from runtime.paging import Block, Pager
from runtime.storage import ALIGNMENT_BYTES, RangeCopy, align_up, in_turns
from teraio.optimizer.managed import ManagedOptimizer
from teraio.optimizer.parameters import OwnedParameter
from teraio.optimizer.replica import Replica, copied
from teraio.optimizer.slicing import BUFFERS, READ_AHEAD, Slicing, update_alone


@contextmanager
def lent_slices(
    pager: Pager, managed: ManagedOptimizer, owned: OwnedParameter, plan: Slicing, stage: str
) -> Iterator[SlicedUpdate]:
    """Give the update of one parameter by slices; within, the pager lends its states. States that do not exist are made.

    stage: name of the stage, for errors. Waits until all states are in the lower tiers. Raises StorageError if a copy failed, and
    BudgetError if a new state does not fit.
    """
    optimizer, parameter = managed.optimizer, owned.tensor
    with ExitStack() as lent:
        states = {}
        for state, dtype in plan.states:
            if state in plan.fresh:
                states[state] = _make(pager, parameter, dtype, managed.states.name(owned, state), stage)
            else:
                states[state] = optimizer.state[parameter][state]
            block = _block(pager, states[state])
            pager.lend([block])
            lent.callback(pager.give_back, [block])
        yield SlicedUpdate(pager, optimizer, owned, plan, states)


def _make(pager: Pager, parameter: Tensor, dtype: torch.dtype, name: str, stage: str) -> Tensor:
    """Make a state whose content is yet to come."""
    pager.acquire([], parameter.numel() * dtype.itemsize, stage)
    try:
        tensor = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        pager.block_of(tensor, name=name, kind="optimizer_state", user_visible=False).user_visible = True
    finally:
        pager.retire([], [])
    return tensor


def _block(pager: Pager, state: Tensor) -> Block:
    block = pager.known_block(state)
    if block is None:
        raise StorageError("a state is updated by slices but is no block; this is a bug in teraio, please report it")
    return block


class SlicedUpdate:
    """The update of one parameter. states: those in `plan`, by name; the pager lends their blocks meanwhile."""

    def __init__(
        self, pager: Pager, optimizer: Optimizer, owned: OwnedParameter, plan: Slicing, states: dict[str, Tensor]
    ) -> None:
        self._pager = pager
        self._optimizer = optimizer
        self._group = owned.group
        self._parameter = owned.tensor
        self._plan = plan
        self._states = states
        self._blocks = {name: _block(pager, tensor) for name, tensor in states.items()}

    def run(self) -> None:
        """Update all slices. Waits until the last ones are written, or will be before the device goes on.

        Parameter and gradient must be on the device. Raises StorageError if a copy failed; a note on the error says whether other
        slices were updated before.
        """
        begins = self._in_order()
        left: dict[str, Any] = {}
        updated = 0
        try:
            with _Ring(self._pager, self._parameter.device, self._plan, self._blocks) as ring:
                for number in range(min(READ_AHEAD, len(begins))):
                    ring.read(number, begins[number])
                for number, begin in enumerate(begins):
                    if number + READ_AHEAD < len(begins):
                        ring.read(number + READ_AHEAD, begins[number + READ_AHEAD])
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
        begins = list(range(0, self._plan.elements, self._plan.slice_elements))
        for name, dtype in self._plan.states:
            if (slot := self._blocks[name].slot) is not None:
                return [place // dtype.itemsize for place in in_turns(slot, [begin * dtype.itemsize for begin in begins])]
        return begins

    def _update(self, begin: int, buffers: dict[str, Tensor]) -> dict[str, Any]:
        """Update one slice, with its states in `buffers`. Return the state that the optimizer leaves, these tensors in it."""
        piece = _flat(self._parameter, begin, self._plan.slice_elements)
        gradient = self._parameter.grad
        piece.grad = _flat(gradient, begin, self._plan.slice_elements) if gradient is not None else None
        before = {
            name: buffers[name] if name in buffers and name not in self._plan.fresh else copied(value)
            for name, value in self._optimizer.state.get(self._parameter, {}).items()
        }
        replica = Replica(parameter=piece, state=before)
        update_alone(self._optimizer, self._group, replica)
        for name, buffer in buffers.items():
            if replica.state[name] is not buffer:
                replica.state[name] = buffer.copy_(replica.state[name])
        return replica.state

    def _take_over(self, left: dict[str, Any]) -> None:
        """Take the counters from the last slice, and states that were made, in the order in which the optimizer makes them."""
        if not left:
            return
        state = self._optimizer.state[self._parameter]
        for name, value in left.items():
            known = state.get(name)
            if name in self._states:
                state[name] = self._states[name]
            elif isinstance(value, Tensor) and isinstance(known, Tensor) and known.shape == value.shape:
                known.copy_(value)
            else:
                state[name] = value


class _Ring:
    """Buffers for BUFFERS slices of all states, and the copies from and to them. On leaving it, all copies have ended."""

    def __init__(self, pager: Pager, device: torch.device, plan: Slicing, blocks: dict[str, Block]) -> None:
        self._pager = pager
        self._plan = plan
        self._blocks = blocks
        self._reading: dict[int, list[RangeCopy]] = {}
        self._writing: dict[int, list[RangeCopy]] = {}
        self._memory = torch.empty(plan.buffer_bytes, dtype=torch.uint8, device=device)
        self._first = -self._memory.data_ptr() % ALIGNMENT_BYTES

    def __enter__(self) -> _Ring:
        return self

    def __exit__(self, *_: object) -> None:
        for copies in (*self._reading.values(), *self._writing.values()):  # copies run here only after an error, which says why
            for copy in copies:
                with suppress(StorageError):
                    copy.wait()
        self._memory = torch.empty(0, dtype=torch.uint8)  # the traceback of an error would keep it

    def read(self, number: int, begin: int) -> None:
        """Begin to read a slice. Waits until the slice before it in the same buffers is written."""
        _wait(self._writing, number - BUFFERS)
        copies = self._reading[number] = []
        for name, dtype in self._plan.states:
            if name not in self._plan.fresh:
                memory = self._bytes(number, begin, name)
                copies.append(self._pager.read_range(self._blocks[name], begin * dtype.itemsize, memory))

    def take(self, number: int, begin: int) -> dict[str, Tensor]:
        """Return the slices of all states. Waits until they are read."""
        _wait(self._reading, number)
        length = self._length(begin)
        return {name: self._bytes(number, begin, name).view(dtype)[:length] for name, dtype in self._plan.states}

    def write(self, number: int, begin: int) -> None:
        """Begin to write a slice."""
        copies = self._writing[number] = []
        for name, dtype in self._plan.states:
            memory = self._bytes(number, begin, name)
            copies.append(self._pager.write_range(self._blocks[name], begin * dtype.itemsize, memory))

    def finish(self) -> None:
        """Wait until all slices are written."""
        for number in list(self._writing):
            _wait(self._writing, number)

    def _length(self, begin: int) -> int:
        return min(self._plan.slice_elements, self._plan.elements - begin)

    def _bytes(self, number: int, begin: int, name: str) -> Tensor:
        """Return the buffer of a state's slice, in whole pages."""
        offset = self._first
        step = self._plan.slice_elements
        for other, dtype in self._plan.states:
            if other == name:
                offset += number % BUFFERS * step * dtype.itemsize
                return self._memory[offset : offset + align_up(self._length(begin) * dtype.itemsize)]
            offset += BUFFERS * step * dtype.itemsize
        raise KeyError(name)


def _wait(copies: dict[int, list[RangeCopy]], number: int) -> None:
    """Wait for the copies of slice `number`, if there are any, and forget them."""
    for copy in copies.get(number, ()):
        copy.wait()
    copies.pop(number, None)


def _flat(tensor: Tensor, begin: int, length: int) -> Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,), 0)[begin : begin + length]
