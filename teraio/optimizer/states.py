"""The states that an optimizer keeps for its parameters, as blocks.

[Note: Optimizer states]
A tensor in `optimizer.state` that is large enough to move is a block like any other. It is persistent. The stage that updates
its parameter reads and writes it. User code may read, save and replace it. Smaller tensors (step counters, states of biases)
stay on the device and are counted in `Pager.fixed_bytes`.

The pager cannot tell a tensor that `torch.load` has read from memory whose address somebody else has. Such a tensor would have
to stay where it is. An optimizer that was given such states gets copies of them, which can leave.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from runtime.device import MIN_MOVED_BYTES
from runtime.paging import Block, Pager, holder_of
from teraio.following import IterationObserver
from teraio.optimizer.capabilities import bytes_of
from teraio.optimizer.parameters import OwnedParameter, owned_parameters

_StateKey = tuple[int, str, int]
"""Number of the parameter, name of the state, position among the tensors of that name."""


class OptimizerStates:
    """Knows which block is which state of one optimizer. Keeps neither a tensor nor the optimizer alive.

    changed: called when `small_bytes` was counted anew. min_moved_bytes: smaller states are no blocks.
    small_bytes: bytes of all tensors in the state that are no blocks.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        pager: Pager,
        recorder: IterationObserver,
        *,
        changed: Callable[[], None],
        min_moved_bytes: int = MIN_MOVED_BYTES,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._pager = pager
        self._recorder = recorder
        self._changed = changed
        self._min_moved_bytes = min_moved_bytes
        self._blocks: dict[_StateKey, Block] = {}
        self.small_bytes = 0

    def blocks(self, owned: OwnedParameter, *, just_made: bool = False) -> list[Block]:
        """Return the blocks of a parameter's large states. New states become blocks.

        just_made: the states were made in the region that runs, and did not exist when it began. Waits while a state that was
        made before teraio managed the optimizer is moved to memory that can leave.
        """
        found = []
        for name, ordinal, tensor in _tensors(self._all_states(), owned.tensor):
            if bytes_of(tensor) < self._min_moved_bytes:
                continue
            self._pager.make_movable(tensor)
            full_name = self.name(owned, name) + (f".{ordinal}" if ordinal else "")
            block = self._pager.block_of(tensor, name=full_name, kind="optimizer_state", user_visible=not just_made)
            key = owned.number, name, ordinal
            before = self._blocks.get(key)
            if before is not None and before is not block and before.dead:
                self._recorder.replace(before, block)
            self._blocks[key] = block
            found.append(block)
        self._pager.show_to_user(found)
        return found

    def name(self, owned: OwnedParameter, state: str) -> str:
        """Return the name of the block of a parameter's state."""
        own = self._pager.known_block(owned.tensor)
        owner = own.name if own is not None and not own.name.startswith("optimizer/") else str(owned.number)
        return f"optimizer/{owner}.{state}"

    def exist(self, parameter: torch.Tensor) -> bool:
        """Return whether the optimizer has made its states for the parameter."""
        return next(_tensors(self._all_states(), parameter), None) is not None

    def made(self, parameters: Iterable[OwnedParameter], known: Sequence[Block]) -> list[Block]:
        """Return the states of these parameters that are not in `known`, which an update has just made.

        Counts the small states anew.
        """
        found = [block for owned in parameters for block in self.blocks(owned, just_made=True)]
        self.count()
        return [block for block in dict.fromkeys(found) if block not in known]

    def adopt(self) -> None:
        """Make blocks of all large states, and count the others.

        Waits while states are copied to memory that can leave.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return
        for owned in owned_parameters(optimizer):
            if self._pager.can_move:
                self._copy_immovable(optimizer.state.get(owned.tensor))
            self.blocks(owned)
        self.count()

    def _copy_immovable(self, state: Any) -> None:
        """Replace large states that cannot leave, because somebody else may have their address, by copies.

        Another owner of such a state, for example the dictionary that was loaded, then has memory of its own.
        """
        if isinstance(state, dict):
            for name in [name for name, value in state.items() if self._is_immovable(value)]:
                state[name] = state[name].clone()

    def _is_immovable(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or self._pager.known_block(value) is not None:
            return False
        held = holder_of(value)
        storage = held.untyped_storage()
        whole = held.nbytes == storage.nbytes() >= self._min_moved_bytes
        return whole and not storage.resizable() and not storage.is_shared() and not self._pager.can_leave(value)

    def count(self) -> None:
        """Count the bytes of states that are no blocks."""
        storages: dict[int, int] = {}
        states = self._all_states()
        for parameter in list(states):
            for _, _, tensor in _tensors(states, parameter):
                if self._pager.known_block(tensor) is None:
                    storage = holder_of(tensor).untyped_storage()
                    storages[storage._cdata] = storage.nbytes()
        self.small_bytes = sum(storages.values())
        self._changed()

    def _all_states(self) -> dict[Any, Any]:
        optimizer = self._optimizer()
        return {} if optimizer is None else optimizer.state


def _tensors(states: dict[Any, Any], parameter: Any) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield the strided tensors of a parameter's state that are on its device, each with its name and position.

    Adds no entry to `states`, which is a defaultdict.
    """
    state = states.get(parameter)
    named: Sequence[tuple[Any, Any]] = list(state.items()) if isinstance(state, dict) else [("state", state)]
    device = parameter.device if isinstance(parameter, torch.Tensor) else None
    for name, value in named:
        leaves = (value,) if isinstance(value, torch.Tensor) else tree_iter(value)
        for ordinal, leaf in enumerate(chain.from_iterable(map(_with_memory, leaves))):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and device in (None, leaf.device):
                yield str(name), ordinal, leaf


def _with_memory(value: Any) -> Iterator[Any]:
    """Yield the tensors that hold the data of a state: of one of 8 bits its codes and scales, since it has no memory itself."""
    holder = holder_of(value) if isinstance(value, torch.Tensor) else value
    if is_traceable_wrapper_subclass(holder):
        names, _ = holder.__tensor_flatten__()
        for name in names:
            yield from _with_memory(getattr(holder, name))
    else:
        yield value
