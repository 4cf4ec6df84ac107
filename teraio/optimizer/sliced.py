"""Updates of parameters whose states never are on the device as a whole: they pass through it in slices.

[Note: Updates by slices]
An update of element by element needs no more of the states than of the parameter at a time. Where parameter, gradient and
states do not fit together, or would take most of the room, the states wait in their slots in the lower tiers, lent by the pager
(see [Note: Lent slots]): while one slice of them is updated, the next ones are read and the one before is written back, in a
ring of buffers that counts as the stage's workspace. Parameter and gradient are on the device as a whole.

The arithmetic is the optimizer's own, over flat views of parameter and gradient and the buffers as states. Counters are
given to each slice as they were, and are taken over from the last one. States that do not exist yet get their slots
first, by blocks that leave at once, and their content slice by slice.

The bits are those of the whole update: slices begin at multiples of ALIGNMENT_BYTES elements, so that vectorised loops leave over
the same elements at the end. On several threads PyTorch's loops on CPU leave some over at the end of each thread's
share as well, and round those of 16 bits otherwise: these follow the number of threads, with and without slices.

In a trace, the states are not among the blocks: no stage has them on the device, and no plan could move them. The time that
their slices are on the links is part of the stage's; that prefetches share the links with them, the planner does not know.
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
from runtime.system import annotate
from teraio.optimizer.replica import Replica, copied
from teraio.optimizer.slicing import BUFFERS, READ_AHEAD, Slicing, update_alone
from teraio.optimizer.states import OptimizerStates
from teraio.optimizer.subgroups import Part


class SlicedUpdates:
    """Lends the states of parameters that are updated by slices, and makes those that do not exist."""

    def __init__(self, pager: Pager, states: OptimizerStates) -> None:
        self._pager = pager
        self._states = states

    @contextmanager
    def lent(self, optimizer: Optimizer, part: Part, name: str) -> Iterator[SlicedUpdate | None]:
        """The update of `part`, the stage `name`, while its states are lent; None if it is not by slices.

        Blocks until all of its states are in the lower tiers. Raises StorageError, and BudgetError where one does not fit.
        """
        plan = part.slicing
        if plan is None:
            yield None
            return
        (number,) = part.numbers
        parameter = [p for group in optimizer.param_groups for p in group["params"]][number]
        with ExitStack() as lent:
            states = {}
            for state, dtype in plan.states:
                if state in plan.fresh:
                    full_name = self._states.name(number, parameter, state)
                    states[state] = self._make(parameter, dtype, full_name, name)
                else:
                    states[state] = optimizer.state[parameter][state]
                block = self._block(states[state])
                self._pager.lend([block])
                lent.callback(self._pager.give_back, [block])
            blocks = {state: self._block(tensor) for state, tensor in states.items()}
            yield SlicedUpdate(self._pager, optimizer, parameter, plan, states, blocks)

    def _make(self, parameter: Tensor, dtype: torch.dtype, name: str, stage: str) -> Tensor:
        """A state whose content is yet to come."""
        self._pager.acquire([], parameter.numel() * dtype.itemsize, stage)
        try:
            tensor = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            self._pager.block_of(tensor, name=name, kind="optimizer_state", user_visible=False).user_visible = True
        finally:
            self._pager.retire([], [])
        return tensor

    def _block(self, state: Tensor) -> Block:
        block = self._pager.known_block(state)
        if block is None:
            raise StorageError("a state is updated by slices but is no block; this is a bug in teraio, please report it")
        return block


class SlicedUpdate:
    """The update of one parameter. pager: has lent `blocks`, those of `states`; both by the names in `plan`."""

    def __init__(
        self,
        pager: Pager,
        optimizer: Optimizer,
        parameter: Tensor,
        plan: Slicing,
        states: dict[str, Tensor],
        blocks: dict[str, Block],
    ) -> None:
        self._pager = pager
        self._optimizer = optimizer
        self._parameter = parameter
        self._plan = plan
        self._states = states
        self._blocks = blocks

    def run(self) -> None:
        """Update all slices. Blocks until the last ones are written, or will be before the device goes on.

        Parameter and gradient must be on the device. Raises StorageError if a copy failed; a note says if slices before it
        were updated.
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
        """Where the slices begin, in elements; drives take turns."""
        begins = list(range(0, self._plan.elements, self._plan.slice_elements))
        for name, dtype in self._plan.states:
            if (slot := self._blocks[name].slot) is not None:
                return [place // dtype.itemsize for place in in_turns(slot, [begin * dtype.itemsize for begin in begins])]
        return begins

    def _update(self, begin: int, buffers: dict[str, Tensor]) -> dict[str, Any]:
        """Update one slice, with its states in `buffers`. Gives the state that the optimizer leaves behind, with these in it."""
        part = _flat(self._parameter, begin, self._plan.slice_elements)
        gradient = self._parameter.grad
        part.grad = _flat(gradient, begin, self._plan.slice_elements) if gradient is not None else None
        before = {
            name: buffers[name] if name in buffers and name not in self._plan.fresh else copied(value)
            for name, value in self._optimizer.state.get(self._parameter, {}).items()
        }
        replica = Replica(parameter=part, state=before)
        with annotate("update", lambda: f"slice of {self._plan.slice_elements} elements from {begin}"):
            update_alone(self._optimizer, self._plan.group, replica)
        for name, buffer in buffers.items():
            if replica.state[name] is not buffer:
                replica.state[name] = buffer.copy_(replica.state[name])
        return replica.state

    def _take_over(self, left: dict[str, Any]) -> None:
        """Counters from the last slice, and states that were made; in the order in which the optimizer makes them."""
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
    """Buffers for BUFFERS slices of all states, and the copies from and to them. All of these have ended when it is left."""

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
        for copies in (*self._reading.values(), *self._writing.values()):  # only after an error, which says why
            for copy in copies:
                with suppress(StorageError):
                    copy.wait()
        self._memory = torch.empty(0, dtype=torch.uint8)  # the traceback of an error would keep it

    def read(self, number: int, begin: int) -> None:
        """Begin to read a slice, once the one before it in the same buffers is written."""
        _wait(self._writing, number - BUFFERS)
        copies = self._reading[number] = []
        for name, dtype in self._plan.states:
            if name not in self._plan.fresh:
                memory = self._bytes(number, begin, name)
                copies.append(self._pager.read_range(self._blocks[name], begin * dtype.itemsize, memory))

    def take(self, number: int, begin: int) -> dict[str, Tensor]:
        """The slices of all states, once they are read."""
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
        """All slices are written."""
        for number in list(self._writing):
            _wait(self._writing, number)

    def _length(self, begin: int) -> int:
        return min(self._plan.slice_elements, self._plan.elements - begin)

    def _bytes(self, number: int, begin: int, name: str) -> Tensor:
        """The buffer of a state's slice, in whole pages."""
        offset = self._first
        step = self._plan.slice_elements
        for other, dtype in self._plan.states:
            if other == name:
                offset += number % BUFFERS * step * dtype.itemsize
                return self._memory[offset : offset + align_up(self._length(begin) * dtype.itemsize)]
            offset += BUFFERS * step * dtype.itemsize
        raise KeyError(name)


def _wait(copies: dict[int, list[RangeCopy]], number: int) -> None:
    """For those of slice `number`, if there are any. They are forgotten once all of them have ended."""
    with annotate("wait", "for copies of a slice"):
        for copy in copies.get(number, ()):
            copy.wait()
    copies.pop(number, None)


def _flat(tensor: Tensor, begin: int, length: int) -> Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,), 0)[begin : begin + length]
