"""Which updates are cut inside a parameter, and into what: see [Note: Updates by slices]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from runtime.device import MIN_MOVED_BYTES
from runtime.paging import Pager
from runtime.storage import ALIGNMENT_BYTES
from teraio.optimizer.capabilities import is_elementwise, keeps_masters, temporary_bytes
from teraio.optimizer.replica import Replica, ReplicaUpdate, by_group, has_elements_of, scratch_replica

BUFFERS = 4
"""Slices of the states that are on the device at once: one that is updated, those that come before it, one that leaves."""
READ_AHEAD = 2
"""Slices that are being read while one is updated."""
_LARGEST_SLICE_BYTES = 32 << 20
_SCRATCH_SHARE = 4
"""Buffers and temporaries of the slices take one part in so many of the parameter's size at most."""
_COUNTERS_BYTES = 1024
"""Of the counters of two slices."""
_TRIED_ELEMENTS = 3
"""Of the parameter that tells which states an optimizer makes; unlike any number of elements of a counter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """How the update of one parameter is cut: into slices of `slice_elements`, the last one shorter.

    group: the optimizer's group that the parameter is in. elements: of the parameter. states: names and types of the states
    that have one element for each of the parameter's. fresh: those of them that the update makes first. buffer_bytes: of the
    slices of states that are on the device; temporary_bytes: of the update of one slice.
    """

    group: int
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
        """Of the states that are made first; they lie in the lower tiers."""
        return sum(self._fresh_sizes())

    @property
    def largest_fresh_bytes(self) -> int:
        """Of one of them, which is on the device for a moment, before the update."""
        return max(self._fresh_sizes(), default=0)

    def _fresh_sizes(self) -> list[int]:
        return [self.elements * dtype.itemsize for name, dtype in self.states if name in self.fresh]


def slicing(optimizer: Optimizer, group: int, parameter: Tensor, pager: Pager) -> Slicing | None:
    """How to cut the update of `parameter`, of the optimizer's group `group`; None if it cannot be cut, or is too small to be.

    Reads no data. Makes no state.
    """
    gradient = parameter.grad
    if gradient is None or not pager.can_move or type(parameter) not in (Tensor, Parameter):
        return None
    if not is_elementwise(optimizer) or keeps_masters(optimizer):
        return None
    state = optimizer.state.get(parameter) or {}
    if not _fills_its_strides(parameter) or not _is_like(gradient, parameter) or gradient.dtype is not parameter.dtype:
        return None
    if not all(_can_be_cut(value, parameter, pager) for value in state.values()):
        return None
    states = _states_after(optimizer, group, parameter)
    itemsize = sum(dtype.itemsize for dtype in states.values())
    fresh = frozenset(name for name in states if not has_elements_of(state.get(name), parameter))

    def needed(elements: int) -> tuple[int, int]:
        """Bytes of buffers and of temporaries. What the update makes is copied into the buffers, and counts once more."""
        buffers = BUFFERS * itemsize * elements + (ALIGNMENT_BYTES if states else 0)
        temporaries = temporary_bytes(optimizer, [(parameter.device.type, elements * parameter.itemsize)])
        return buffers, temporaries + (itemsize * elements if fresh else 0) + (_COUNTERS_BYTES if states else 0)

    elements = _largest_power_of_two(_LARGEST_SLICE_BYTES // parameter.itemsize)
    while elements >= ALIGNMENT_BYTES and _SCRATCH_SHARE * sum(needed(elements)) > parameter.nbytes:
        elements //= 2
    if elements < ALIGNMENT_BYTES:  # then slices would not be whole pages, whatever the size of an element
        return None
    buffer_bytes, temporaries = needed(elements)
    return Slicing(
        group=group,
        elements=parameter.numel(),
        slice_elements=elements,
        states=tuple(states.items()),
        fresh=fresh,
        buffer_bytes=buffer_bytes,
        temporary_bytes=temporaries,
    )


def _fills_its_strides(tensor: Tensor) -> bool:
    """Its elements are all there is in a storage's first bytes, each once: then they are a flat tensor in another order."""
    dense = tensor.layout is torch.strided and torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    return dense and tensor.storage_offset() == 0


def _is_like(tensor: Tensor, parameter: Tensor) -> bool:
    same = tensor.layout is torch.strided and tensor.shape == parameter.shape and tensor.stride() == parameter.stride()
    return same and tensor.device == parameter.device and tensor.storage_offset() == 0


def _can_be_cut(state: object, parameter: Tensor, pager: Pager) -> bool:
    """It is a number, a small tensor, or a block by itself that can leave and is laid out as the parameter is."""
    if not isinstance(state, Tensor):
        return state is None or isinstance(state, (bool, int, float))
    if not has_elements_of(state, parameter):
        return state.nbytes < MIN_MOVED_BYTES
    block = pager.known_block(state)
    return _is_like(state, parameter) and block is not None and block.span is not None and block.size_bytes == state.nbytes


def _states_after(optimizer: Optimizer, group: int, parameter: Tensor) -> dict[str, torch.dtype]:
    """The states of element per element that the next update leaves behind, found out by one over a tiny parameter."""
    replica = scratch_replica(optimizer, parameter, (_TRIED_ELEMENTS,))
    update_alone(optimizer, group, replica)
    return {name: value.dtype for name, value in replica.state.items() if has_elements_of(value, replica.parameter)}


def update_alone(optimizer: Optimizer, group: int, replica: Replica) -> None:
    """Update one replica of a parameter of the optimizer's group `group`."""
    ReplicaUpdate(optimizer, by_group(optimizer, [(group, replica)])).run()


def _largest_power_of_two(limit: int) -> int:
    return 1 << max(limit, 1).bit_length() - 1
