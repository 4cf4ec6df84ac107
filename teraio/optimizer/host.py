"""Updates of optimizer subgroups on the host's processor, where their states, gradients and parameters wait.

[Note: Updates on the host]
A plan says which subgroups update there. Their blocks wait in the host tier, and the optimizer's own update runs over
tensors that lie there (`teraio.optimizer.replica`), by PyTorch's fused implementation where it has one: results agree with
those of the device to rounding. One update runs at a time, in the plan's order, in a thread of its own, while the device
updates other subgroups. Only parameters come back. All have ended before user code goes on after `step()`, since it may
look at any of them: `Pager.leave_region` waits for what is lent.

What is too small to be a block is updated on the device as ever. Where a block does not wait in the host tier (before the
first planned iteration, or after a deviation) the whole subgroup is, and goes there afterwards.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from runtime.device import MIN_MOVED_BYTES, Mark
from runtime.paging import Block, Pager
from runtime.system import annotate, first_of
from teraio.optimizer.capabilities import bytes_of, fused_on_host, keeps_masters, reason_against_host, states_per_parameter
from teraio.optimizer.masters import lacks_master, update_replicas
from teraio.optimizer.replica import Replica, by_group


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A parameter that updates on the host. blocks: itself, its gradient and its large states, with their tensors.

    state: of the optimizer. small: its other tensors, with what stands for them in main memory.
    """

    group: int
    parameter: Tensor
    blocks: tuple[tuple[Block, Tensor], ...]
    state: dict[str, Any]
    small: tuple[tuple[Tensor, Tensor], ...]


class HostUpdate:
    """An update that was begun; `members`: numbers of its parameters. give_back: of its blocks, if it never runs."""

    def __init__(
        self,
        members: frozenset[int],
        small: Sequence[tuple[Tensor, Tensor]],
        seconds: Future[float | None],
        *,
        counters: _Counters,
        give_back: Callable[[], None],
    ) -> None:
        self.members = members
        self._small = small
        self._counters = counters
        self._seconds = seconds
        self._give_back = give_back

    def seconds(self) -> float | None:
        """How long it took on the processor; None if its blocks did not get there, and nothing has been updated.

        Blocks until it has ended, and raises what it raised.
        """
        seconds = self._seconds.result()
        if seconds is not None:
            for state, here in self._small:
                self._counters.update(state, here)
        return seconds

    def give_up(self) -> None:
        """The step has failed: update nothing, but if that has begun, block until it has ended."""
        if self._seconds.cancel():
            self._give_back()
        elif self._seconds.exception() is None:
            self.seconds()


class HostUpdates:
    """Runs updates in one thread, in the order in which they are begun, see [Note: Updates on the host]."""

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self._thread: ThreadPoolExecutor | None = None
        self._counters = _Counters()

    def begin(self, optimizer: Optimizer, numbers: Sequence[int]) -> HostUpdate | None:
        """Begin the update of the parameters `numbers`, as far as they consist of blocks; None if it cannot run there now.

        For the training thread, in a region. Blocks only where the device has counters that nobody here knows.
        """
        if reason_against_host(optimizer) is not None:
            return None
        members = self._members(optimizer, frozenset(numbers))
        blocks = list(dict.fromkeys(block for member in members.values() for block, _ in member.blocks))
        if not blocks or not self._pager.set_aside(blocks):
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="teraio-host-update")
        update = _Update(optimizer, list(members.values()), blocks)
        seconds = self._thread.submit(update.run, self._pager, self._pager.device.mark())
        small = [pair for member in members.values() for pair in member.small]
        return HostUpdate(
            frozenset(members),
            small,
            seconds,
            counters=self._counters,
            give_back=functools.partial(self._pager.give_back, blocks),
        )

    def wait_for(self, update: HostUpdate) -> float | None:
        """`update.seconds()`, for the training thread: counts as waiting."""
        began = time.perf_counter()
        try:
            with annotate("wait", "for an update on the host"):
                return update.seconds()
        finally:
            self._pager.waited_seconds += time.perf_counter() - began

    def close(self) -> None:
        """Blocks until nothing is updated any more."""
        if self._thread is not None:
            self._thread.shutdown()

    def _members(self, optimizer: Optimizer, numbers: frozenset[int]) -> dict[int, _Member]:
        members: dict[int, _Member] = {}
        number = 0
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if number in numbers and (member := self._member(optimizer, index, parameter)) is not None:
                    members[number] = member
                number += 1
        return members

    def _member(self, optimizer: Optimizer, group: int, parameter: Tensor) -> _Member | None:
        state = optimizer.state.get(parameter, {})
        if parameter.grad is None or (not state and states_per_parameter(optimizer)) or lacks_master(optimizer, parameter):
            return None
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        if len(tensors) < len(state):  # such as a momentum of None: what an update puts there would not come back
            return None
        large = [parameter, parameter.grad, *(t for t in tensors if bytes_of(t) >= MIN_MOVED_BYTES)]
        blocks = [(block, t) for t in large if (block := self._pager.known_block(t)) is not None and block.span is not None]
        if len(blocks) < len(large) or any(t.is_conj() or t.is_neg() for t in large):  # memory alone does not tell the value
            return None
        small = tuple((t, self._counters.here(t)) for t in tensors if bytes_of(t) < MIN_MOVED_BYTES)
        return _Member(group=group, parameter=parameter, blocks=tuple(blocks), state=state, small=small)


class _Update:
    """One update, for the thread that runs it. Holds the tensors, so that no memory goes meanwhile."""

    def __init__(self, optimizer: Optimizer, members: Sequence[_Member], blocks: Sequence[Block]) -> None:
        self._optimizer = optimizer
        self._members = members
        self._blocks = blocks

    def run(self, pager: Pager, device_passed: Mark) -> float | None:
        """Seconds that the processor took; None if the blocks cannot be had."""
        device_passed.wait()  # user code may have had the device change gradients where they wait
        addresses = pager.lend_memory(self._blocks)
        if addresses is None:
            return None
        began = time.perf_counter()
        try:
            with annotate("update", lambda: f"{first_of([block.name for block in self._blocks])} on the host"):
                self._update(dict(zip(self._blocks, addresses, strict=True)))
        finally:
            pager.give_back(self._blocks)
        return time.perf_counter() - began

    def _update(self, address_of: Mapping[Block, int]) -> None:
        fused = fused_on_host(self._optimizer, {member.parameter.dtype for member in self._members})
        # With masters one by one: each takes memory for its gradient in fp32.
        batches = [[member] for member in self._members] if keeps_masters(self._optimizer) else [self._members]
        for batch in batches:
            replicas = ((member.group, _replica(member, address_of)) for member in batch)
            update_replicas(self._optimizer, by_group(self._optimizer, replicas), fused=fused)


def _replica(member: _Member, address_of: Mapping[Block, int]) -> Replica:
    (own, parameter), (gradient_block, gradient), *states = member.blocks
    replica = tensor_at(address_of[own], parameter)
    replica.grad = tensor_at(address_of[gradient_block], gradient)
    here = [(tensor, tensor_at(address_of[block], tensor)) for block, tensor in states]
    return Replica(parameter=replica, state={name: _find(value, (*here, *member.small)) for name, value in member.state.items()})


def _find(value: Any, pairs: Iterable[tuple[Tensor, Tensor]]) -> Any:
    return next((here for tensor, here in pairs if tensor is value), value)


def tensor_at(address: int, like: Tensor) -> Tensor:
    """A tensor of main memory with the shape, strides and type of `like`, whose storage begins at `address`."""
    size_bytes = bytes_of(like)
    memory = (ctypes.c_char * size_bytes).from_address(address)
    flat = torch.frombuffer(memory, dtype=like.dtype, count=size_bytes // like.element_size())
    return flat.as_strided(like.size(), like.stride(), like.storage_offset())


class _Counters:
    """Small states in main memory; those of a device are copied only if something else than an update here has changed them.

    A copy is known by the version of the state that it was written back to; nobody knows what becomes of one before that.
    """

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()

    def here(self, state: Tensor) -> Tensor:
        """The state in main memory: itself if it is there. Blocks until the device has got to it where it has to be copied."""
        if state.device.type == "cpu":
            return state
        known: tuple[int, Tensor] | None = self._known.pop(state, None)  # type: ignore[no-untyped-call]
        return known[1] if known is not None and known[0] == state._version else state.cpu()

    def update(self, state: Tensor, here: Tensor) -> None:
        """An update has made `here` of what `here` gave for the state."""
        if state is not here:
            state.copy_(here)
            self._known[state] = (state._version, here)
