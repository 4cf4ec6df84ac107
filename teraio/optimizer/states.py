"""The states that optimizers keep for their parameters, as blocks.

[Note: Optimizer states]
A tensor in `optimizer.state` that is large enough to move is a block like any other: persistent, read and written by the
stage that updates its parameter. User code may read, save and replace it. Smaller ones (step counters, states of biases)
stay on the device and are counted in `Pager.fixed_bytes`.

What `torch.load` has read cannot be told from memory that others have the address of, so it would have to stay where it
is. An optimizer that was given such states gets copies, which can leave.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter

from runtime.device import MIN_MOVED_BYTES
from runtime.paging import Block, Pager
from teraio.profiling import IterationRecorder

_Place = tuple[int, str, int]
"""Number of the parameter, name of the state, number among the tensors of that name."""


class OptimizerStates:
    """Knows which block is which state; holds no tensor and no optimizer."""

    def __init__(self, pager: Pager, timeline: IterationRecorder) -> None:
        self._pager = pager
        self._timeline = timeline
        self._blocks: weakref.WeakKeyDictionary[Optimizer, dict[_Place, Block]] = weakref.WeakKeyDictionary()
        self._small_bytes: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def blocks(self, optimizer: Optimizer, number: int, parameter: torch.Tensor, *, just_made: bool = False) -> list[Block]:
        """The large states of the optimizer's parameter `number`; new ones become blocks.

        just_made: in the region that runs, so that they were not there when it began. Blocks while one that was made before
        teraio moves to memory that can leave.
        """
        known = self._blocks.setdefault(optimizer, {})
        found = []
        for name, ordinal, tensor in _tensors(optimizer, parameter):
            if tensor.untyped_storage().nbytes() < MIN_MOVED_BYTES:
                continue
            self._pager.make_movable(tensor)
            full_name = self.name(number, parameter, name) + (f".{ordinal}" if ordinal else "")
            block = self._pager.block_of(tensor, name=full_name, kind="optimizer_state", user_visible=not just_made)
            block.user_visible = True
            before = known.get((number, name, ordinal))
            if before is not None and before is not block and before.dead:
                self._timeline.replace(before, block)
            known[number, name, ordinal] = block
            found.append(block)
        return found

    def name(self, number: int, parameter: torch.Tensor, state: str) -> str:
        """What the block of a state of the optimizer's parameter `number` is called."""
        own = self._pager.known_block(parameter)
        owner = own.name if own is not None and not own.name.startswith("optimizer/") else str(number)
        return f"optimizer/{owner}.{state}"

    def exist(self, optimizer: Optimizer, parameter: torch.Tensor) -> bool:
        """Whether the optimizer has made its states for the parameter."""
        return next(_tensors(optimizer, parameter), None) is not None

    def made(self, optimizer: Optimizer, numbers: Sequence[int], known: Sequence[Block]) -> list[Block]:
        """The states of the parameters `numbers` that are not among `known`: an update has just made them. Counts the others."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found = [block for number in numbers for block in self.blocks(optimizer, number, parameters[number], just_made=True)]
        self.count(optimizer)
        return [block for block in dict.fromkeys(found) if block not in known]

    def adopt(self, optimizer: Optimizer) -> None:
        """Make blocks of all large states, and count the others. Blocks while states are copied to where they can leave from."""
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            if self._pager.can_move:
                self._copy_lent(optimizer.state.get(parameter))
            self.blocks(optimizer, number, parameter)
        self.count(optimizer)

    def _copy_lent(self, state: Any) -> None:
        """Put copies in place of large states that cannot leave for who may have their address.

        Whoever still holds the others, such as the dictionary that was loaded, holds memory of his own.
        """
        if isinstance(state, dict):
            for name in [name for name, value in state.items() if self._is_lent(value)]:
                state[name] = state[name].clone()

    def _is_lent(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or self._pager.known_block(value) is not None:
            return False
        storage = value.untyped_storage()
        whole = value.nbytes == storage.nbytes() >= MIN_MOVED_BYTES
        return whole and not storage.resizable() and not storage.is_shared() and not self._pager.can_leave(value)

    def count(self, optimizer: Optimizer) -> None:
        """What is in the state and no block counts as resident."""
        self._small_bytes[optimizer] = self._bytes_beside_blocks(optimizer)
        self._pager.fixed_bytes = sum(self._small_bytes.values())

    def _bytes_beside_blocks(self, optimizer: Optimizer) -> int:
        storages: dict[int, int] = {}
        for parameter in list(optimizer.state):
            for _, _, tensor in _tensors(optimizer, parameter):
                if self._pager.known_block(tensor) is None:
                    storage = tensor.untyped_storage()
                    storages[storage._cdata] = storage.nbytes()
        return sum(storages.values())


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of all tensors in the optimizer's state, shared storages counted once."""
    storages = [t.untyped_storage() for p in list(optimizer.state) for _, _, t in _tensors(optimizer, p)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _tensors(optimizer: Optimizer, parameter: Any) -> Iterator[tuple[str, int, torch.Tensor]]:
    """The strided tensors of a parameter's state on its device, with their names; `state` must not get a new entry."""
    state = optimizer.state.get(parameter)
    named: Sequence[tuple[Any, Any]] = list(state.items()) if isinstance(state, dict) else [("state", state)]
    device = parameter.device if isinstance(parameter, torch.Tensor) else None
    for name, value in named:
        leaves = (value,) if isinstance(value, torch.Tensor) else tree_iter(value)
        for ordinal, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and device in (None, leaf.device):
                yield str(name), ordinal, leaf
