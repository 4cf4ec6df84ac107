"""Decides which parameters are updated by slices, and how large the slices are: see [Note: Updates by slices]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from runtime.device import MIN_MOVED_BYTES
from runtime.paging import Pager
from runtime.storage import ALIGNMENT_BYTES
from teraio.distributed import rank_count
from teraio.optimizer.capabilities import is_elementwise, keeps_masters, temporary_bytes
from teraio.optimizer.parameters import OwnedParameter
from teraio.optimizer.replica import Replica, ReplicaUpdate, by_group, has_elements_of, scratch_replica

BUFFERS = 4
"""Slices of the states that are on the device at once: one that is updated, two that are read, one that is written back."""
READ_AHEAD = 2
"""Slices that are read ahead while one is updated."""
_MAX_SLICE_BYTES = 32 << 20
_SCRATCH_SHARE = 4
"""Buffers and temporaries of the slices take at most the parameter's size divided by this."""
_COUNTERS_BYTES = 1024
"""Bytes reserved for the counters of two slices."""
_TRIED_ELEMENTS = 3
"""Elements of the scratch parameter that tells which states an optimizer makes. No counter has as many elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """How the update of one parameter is cut: into slices of `slice_elements`, the last one shorter.

    elements: of the parameter. states: names and types of the states that have one element for each of the parameter's.
    fresh: names of those states that the update makes first. buffer_bytes: of all slices of states that are on the device at
    once. temporary_bytes: what the update of one slice allocates.
    """

    elements: int
    slice_elements: int
    states: tuple[tuple[str, torch.dtype], ...]
    fresh: frozenset[str]
    buffer_bytes: int
    temporary_bytes: int

    @property
    def workspace_bytes(self) -> int:
        """What the update needs on the device besides parameter and gradient."""
        return self.buffer_bytes + self.temporary_bytes

    @property
    def fresh_bytes(self) -> int:
        """Bytes of the states that are made first. They are in the lower tiers."""
        return sum(self._fresh_sizes())

    @property
    def largest_fresh_bytes(self) -> int:
        """Bytes of the largest of them. Each is on the device for a moment, before the update."""
        return max(self._fresh_sizes(), default=0)

    def _fresh_sizes(self) -> list[int]:
        return [self.elements * dtype.itemsize for name, dtype in self.states if name in self.fresh]


def slicing(
    optimizer: Optimizer, owned: OwnedParameter, pager: Pager, *, min_moved_bytes: int = MIN_MOVED_BYTES
) -> Slicing | None:
    """Return how to cut the update of a parameter into slices; None if that is not possible, or the parameter is too small.

    Reads no data and makes no state. min_moved_bytes: smaller states are copied for each slice.
    """
    parameter, gradient = owned.tensor, owned.tensor.grad
    if gradient is None or not pager.can_move or type(parameter) not in (Tensor, Parameter):
        return None
    if rank_count() > 1 and parameter.itemsize < 4:  # slices may round differently, see [Note: Several ranks]
        return None
    if not is_elementwise(optimizer) or keeps_masters(optimizer):
        return None
    state = optimizer.state.get(parameter) or {}
    if not _fills_its_strides(parameter) or not _is_like(gradient, parameter) or gradient.dtype is not parameter.dtype:
        return None
    if not all(_can_be_cut(value, parameter, pager, min_moved_bytes) for value in state.values()):
        return None
    states = _states_after(optimizer, owned)
    itemsize = sum(dtype.itemsize for dtype in states.values())
    fresh = frozenset(name for name in states if not has_elements_of(state.get(name), parameter))

    def needed(elements: int) -> tuple[int, int]:
        """Return the bytes of buffers and of temporaries. Fresh states count twice: as made by the update, and as copies."""
        buffers = BUFFERS * itemsize * elements + (ALIGNMENT_BYTES if states else 0)
        temporaries = temporary_bytes(optimizer, [(parameter.device.type, elements * parameter.itemsize)])
        return buffers, temporaries + (itemsize * elements if fresh else 0) + (_COUNTERS_BYTES if states else 0)

    elements = _largest_power_of_two(_MAX_SLICE_BYTES // parameter.itemsize)
    while elements >= ALIGNMENT_BYTES and _SCRATCH_SHARE * sum(needed(elements)) > parameter.nbytes:
        elements //= 2
    if elements < ALIGNMENT_BYTES:  # fewer elements are not whole pages for every element size
        return None
    buffer_bytes, temporaries = needed(elements)
    return Slicing(
        elements=parameter.numel(),
        slice_elements=elements,
        states=tuple(states.items()),
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


def _can_be_cut(state: object, parameter: Tensor, pager: Pager, min_moved_bytes: int) -> bool:
    """Return whether a state is a number, a small tensor, or a block of its own that can leave and has the parameter's layout."""
    if not isinstance(state, Tensor):
        return state is None or isinstance(state, (bool, int, float))
    if not has_elements_of(state, parameter):
        return state.nbytes < min_moved_bytes
    block = pager.known_block(state)
    return _is_like(state, parameter) and block is not None and block.span is not None and block.size_bytes == state.nbytes


def _states_after(optimizer: Optimizer, owned: OwnedParameter) -> dict[str, torch.dtype]:
    """Return the elementwise states that the next update leaves, found out by an update of a tiny parameter."""
    replica = scratch_replica(optimizer, owned.tensor, (_TRIED_ELEMENTS,))
    update_alone(optimizer, owned.group, replica)
    return {name: value.dtype for name, value in replica.state.items() if has_elements_of(value, replica.parameter)}


def update_alone(optimizer: Optimizer, group: int, replica: Replica) -> None:
    """Update one replica of a parameter of the optimizer's group `group`."""
    ReplicaUpdate(optimizer, by_group(optimizer, [(group, replica)])).run()


def _largest_power_of_two(limit: int) -> int:
    return 1 << max(limit, 1).bit_length() - 1
