"""Updates of optimizer subgroups on the host's processor, where their states, gradients and parameters wait.

[Note: Updates on the host]
A plan says which subgroups are updated there. Their blocks wait in the host tier, and the optimizer's own update runs over
tensors in that memory (`teraio.optimizer.replica`), by PyTorch's fused implementation where there is one. Results agree with
those of the device up to rounding. One update runs at a time, in the plan's order, in a thread of its own, while the device
updates other subgroups. Only parameters come back to the device. All updates have ended before user code goes on after `step()`,
since it may look at any of the blocks: `Pager.leave_region` waits for blocks that are lent.

Parameters that are too small to be a block are always updated on the device. If a block of a subgroup is not in the host tier
(before the first planned iteration, or after a deviation from the plan), the device updates the whole subgroup, and its blocks
go to the host tier afterwards.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from runtime.device import MIN_MOVED_BYTES, Mark
from runtime.paging import Block, Pager, holder_of
from runtime.system import annotate, first_of
from teraio.optimizer.capabilities import (
    bytes_of,
    fused_on_host,
    keeps_masters,
    reason_against_host,
    states_per_parameter,
    updates_alone,
)
from teraio.optimizer.host_threads import compute_pool
from teraio.optimizer.masters import lacks_master, update_replicas
from teraio.optimizer.parameters import OwnedParameter
from teraio.optimizer.replica import Replica, by_group


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMember:
    """A parameter that is updated on the host. blocks: of itself, its gradient and its large states, with their tensors.

    state: of the optimizer. small: its other tensors, each with its copy in main memory.
    """

    owned: OwnedParameter
    blocks: tuple[tuple[Block, Tensor], ...]
    state: dict[str, Any]
    small: tuple[tuple[Tensor, Tensor], ...]


class HostUpdate:
    """One update of some parameters. Keeps their tensors alive, so that no memory is freed meanwhile.

    members: numbers of the parameters.
    """

    def __init__(self, optimizer: Optimizer, members: Sequence[HostMember], pager: Pager, counters: HostCounters) -> None:
        self.members = frozenset(member.owned.number for member in members)
        self._optimizer = optimizer
        self._members = members
        self._pager = pager
        self._counters = counters
        self._blocks = list(dict.fromkeys(block for member in members for block, _ in member.blocks))
        self._result: Future[float | None]  # from `begin` on

    # -- for the training thread

    def begin(self, thread: ThreadPoolExecutor) -> bool:
        """Put the update into the thread's queue. Never waits.

        Returns False, and begins nothing, unless all its blocks are in the host tier or on their way there. From then on no
        prefetch takes the blocks away before the update has run, or `give_up` is called.
        """
        if not self._blocks or not self._pager.reserve_for_host(self._blocks):
            return False
        self._result = thread.submit(self.run, self._pager.device.mark())
        return True

    def seconds(self) -> float | None:
        """Return how long the update took on the processor; None if its blocks did not get there, and nothing was updated.

        Waits until it has ended, and raises what it raised.
        """
        seconds = self._result.result()
        if seconds is not None:
            self._counters.update([pair for member in self._members for pair in member.small])
        return seconds

    def give_up(self) -> None:
        """Update nothing, since the step has failed. If the update runs already, wait until it has ended."""
        if self._result.cancel():
            self._pager.give_back(self._blocks)
        elif self._result.exception() is None:
            self.seconds()

    # -- for the thread that runs it

    def run(self, device_passed: Mark) -> float | None:
        """Run the update. Return the seconds that the processor took; None if the blocks do not get to the host tier."""
        device_passed.wait()  # user code may have had the device change gradients where they wait
        addresses = self._pager.lend_memory(self._blocks)
        if addresses is None:
            return None
        began = time.perf_counter()
        try:
            with annotate("update", lambda: f"{first_of([block.name for block in self._blocks])} on the host"):
                self.update(dict(zip(self._blocks, addresses, strict=True)))
        finally:
            self._pager.give_back(self._blocks)
        return time.perf_counter() - began

    def update(self, address_of: Mapping[Block, int]) -> None:
        """Run the optimizer's arithmetic over the blocks, which lie at these addresses."""
        fused = fused_on_host(self._optimizer, {member.owned.tensor.dtype for member in self._members})
        # With masters one by one, since each takes memory for its gradient in fp32.
        batches = [[member] for member in self._members] if keeps_masters(self._optimizer) else [self._members]
        for batch in batches:
            replicas = ((member.owned.group, _replica(member, address_of)) for member in batch)
            update_replicas(self._optimizer, by_group(self._optimizer, replicas), fused=fused)


class HostUpdates:
    """Runs updates in one thread, in the order in which they are begun, see [Note: Updates on the host].

    min_moved_bytes: smaller states are on the device, and are copied to main memory for the update. threads: that compute an
    update; None: as many as PyTorch uses.
    """

    def __init__(self, pager: Pager, *, min_moved_bytes: int = MIN_MOVED_BYTES, threads: int | None = None) -> None:
        self._pager = pager
        self._min_moved_bytes = min_moved_bytes
        self._threads = threads
        self._thread: ThreadPoolExecutor | None = None
        self._counters = HostCounters()

    def begin(self, optimizer: Optimizer, parameters: Iterable[OwnedParameter]) -> HostUpdate | None:
        """Begin the update of those of the parameters that consist of blocks; None if it cannot run on the host now.

        For the training thread, in a region. Waits only for counters on the device whose value is not known on the host.
        """
        if reason_against_host(optimizer) is not None:
            return None
        if self._thread is None:  # which starts its thread at the first update
            self._thread = compute_pool(1, self._threads, "teraio-host-update")
        update = HostUpdate(optimizer, self.members(optimizer, parameters), self._pager, self._counters)
        return update if update.begin(self._thread) else None

    def wait_for(self, update: HostUpdate) -> float | None:
        """Return `update.seconds()`. For the training thread: the time counts as waiting."""
        began = time.perf_counter()
        try:
            with annotate("wait", "for an update on the host"):
                return update.seconds()
        finally:
            self._pager.add_waited(time.perf_counter() - began)

    def close(self) -> None:
        """Wait until no update runs any more."""
        if self._thread is not None:
            self._thread.shutdown()

    def members(self, optimizer: Optimizer, parameters: Iterable[OwnedParameter]) -> list[HostMember]:
        """Return those of the parameters whose update the host can do: memory alone tells their value and that of all states."""
        return [member for owned in parameters if (member := self._member(optimizer, owned)) is not None]

    def _member(self, optimizer: Optimizer, owned: OwnedParameter) -> HostMember | None:
        parameter = owned.tensor
        state = optimizer.state.get(parameter, {})
        if not updates_alone(optimizer, parameter):  # see [Note: Several ranks]
            return None
        if parameter.grad is None or (not state and states_per_parameter(optimizer)) or lacks_master(optimizer, parameter):
            return None
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        if len(tensors) < len(state):  # such as a momentum of None: what an update puts there would not come back
            return None
        large = [parameter, parameter.grad, *(t for t in tensors if bytes_of(t) >= self._min_moved_bytes)]
        blocks = [(block, t) for t in large if (block := self._pager.known_block(t)) is not None and block.span is not None]
        if len(blocks) < len(large) or any(t.is_conj() or t.is_neg() for t in large):
            return None
        if holder_of(parameter.grad).size() != holder_of(parameter).size():
            return None  # a DTensor that is sharded in another way: the update on the device redistributes it
        small = tuple((t, self._counters.here(t)) for t in tensors if bytes_of(t) < self._min_moved_bytes)
        return HostMember(owned=owned, blocks=tuple(blocks), state=state, small=small)


def _replica(member: HostMember, address_of: Mapping[Block, int]) -> Replica:
    (own, parameter), (gradient_block, gradient), *states = member.blocks
    replica = tensor_at(address_of[own], parameter)
    replica.grad = tensor_at(address_of[gradient_block], gradient)
    here = [(tensor, tensor_at(address_of[block], tensor)) for block, tensor in states]
    return Replica(parameter=replica, state={name: _find(value, (*here, *member.small)) for name, value in member.state.items()})


def _find(value: Any, pairs: Iterable[tuple[Tensor, Tensor]]) -> Any:
    return next((here for tensor, here in pairs if tensor is value), value)


def tensor_at(address: int, like: Tensor) -> Tensor:
    """Return a tensor of main memory with the shape, strides and type of `like`, whose storage begins at `address`.

    Of a DTensor, those of its local part.
    """
    like = holder_of(like)
    size_bytes = bytes_of(like)
    memory = (ctypes.c_char * size_bytes).from_address(address)
    flat = torch.frombuffer(memory, dtype=like.dtype, count=size_bytes // like.element_size())
    return flat.as_strided(like.size(), like.stride(), like.storage_offset())


class HostCounters:
    """Small states in main memory. One on a device is copied only if something besides these updates has changed it.

    A copy is known to be current by the version of the state that it was written back to. Between `here` and `update` no copy
    is known, since the update may fail.
    """

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()

    def here(self, state: Tensor) -> Tensor:
        """Return the state in main memory: itself if it is there. A copy from the device waits for the device."""
        if state.device.type == "cpu":
            return state
        known: tuple[int, Tensor] | None = self._known.pop(state, None)  # type: ignore[no-untyped-call]
        return known[1] if known is not None and known[0] == state._version else state.cpu()

    def update(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Write back to each state what an update has left in its second tensor, the one that `here` gave.

        Numbers on a device, such as AdamW's steps, are written there by kernels that get the value as an argument: a copy from
        ordinary main memory would wait for the device, once for each parameter. Equal ones share a kernel.
        """
        numbers: dict[tuple[torch.device, torch.dtype, float], list[Tensor]] = {}
        away = [(state, here) for state, here in pairs if state is not here]
        for state, here in away:
            if state.numel() == 1 and state.is_floating_point():
                numbers.setdefault((state.device, state.dtype, here.item()), []).append(state)
            else:
                state.copy_(here)
        for (_, _, value), states in numbers.items():
            torch._foreach_zero_(states)
            torch._foreach_add_(states, value)
        for state, here in away:
            self._known[state] = (state._version, here)
