"""Updates of optimizer subgroups on the host's processor, where their states, gradients and parameters wait.

[Note: Updates on the host]
A plan says which subgroups are updated there. Their blocks wait in the host tier, and the optimizer's own update runs over
tensors in that memory (`teraio.optimizer.arithmetic`), by PyTorch's fused implementation where there is one. Results agree with
those of the device up to rounding. One update runs at a time, in the plan's order, in a thread of its own, while the device
updates other subgroups. Only parameters come back to the device. All updates have ended before user code goes on after `step()`,
since it may look at any of the blocks: `Pager.leave_region` waits for blocks that are lent.

Parameters that are too small to be a block are always updated on the device. If a block of a subgroup is not in the host tier
(before the first planned iteration, or after a deviation from the plan), the device updates the whole subgroup, and its blocks
go to the host tier afterwards. How long updates take there is measured by `HostRates`, over scratch memory in the host tier.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from runtime.device import Mark
from runtime.paging import Block, Pager, holder_of
from runtime.storage import align_up
from runtime.system import annotate, first_of, machine_cores
from teraio.optimizer.arithmetic import Replica, update_replicas
from teraio.optimizer.facts import OptimizerFacts, OwnedParameter, bytes_of, moves

_ELEMENTS = (4 << 20, 1 << 20, 256 << 10, 64 << 10)  # of a measured update: fewer if the host tier has less room
_RUNS = 3
_ATTEMPTS = 32  # how often to look for room to measure in, since the host tier may be full for a while

# Gives memory of so many bytes in the host tier for a while: its address, or None if there is no room.
Scratch = Callable[[int], AbstractContextManager[int | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMember:
    """A parameter that is updated on the host. blocks: of itself, its gradient and its large states, with their tensors.

    state: of the optimizer. small: its other tensors, each with its copy in main memory.
    """

    owned: OwnedParameter
    blocks: tuple[tuple[Block, Tensor], ...]
    state: dict[str, Any]
    small: tuple[tuple[Tensor, Tensor], ...]

    def replica(self, address_of: Mapping[Block, int]) -> Replica:
        """Return what is updated in its place: the same tensors over the memory of the host tier."""
        (own, parameter), (gradient_block, gradient), *states = self.blocks
        there = tensor_at(address_of[own], parameter)
        there.grad = tensor_at(address_of[gradient_block], gradient)
        # By identity, since tensors have no equality.
        moved = {id(tensor): tensor_at(address_of[block], tensor) for block, tensor in states}
        moved |= {id(tensor): here for tensor, here in self.small}
        state = {name: moved.get(id(value), value) for name, value in self.state.items()}
        return Replica(group=self.owned.group, parameter=there, state=state)


class HostUpdate:
    """One update of some parameters. Keeps their tensors alive, so that no memory is freed meanwhile.

    members: numbers of the parameters.
    """

    def __init__(self, facts: OptimizerFacts, members: Sequence[HostMember], pager: Pager, counters: HostCounters) -> None:
        self.members = frozenset(member.owned.number for member in members)
        self._facts = facts
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
        if not self._blocks or not self._pager.lending.reserve_for_host(self._blocks):
            return False
        self._result = thread.submit(self.run, self._pager.device.mark())
        return True

    def seconds(self) -> float | None:
        """Return how long the update took on the processor; None if its blocks did not get there, and nothing was updated.

        Waits until it has ended, and raises what it raised. The time counts as waiting.
        """
        began = time.perf_counter()
        try:
            with annotate("wait", "for an update on the host"):
                seconds = self._result.result()
        finally:
            self._pager.account.waited_seconds += time.perf_counter() - began
        if seconds is not None:
            self._counters.update([pair for member in self._members for pair in member.small])
        return seconds

    def give_up(self) -> None:
        """Update nothing, since the step has failed. If the update runs already, wait until it has ended."""
        if self._result.cancel():
            self._pager.lending.give_back(self._blocks)
        elif self._result.exception() is None:
            self.seconds()

    # -- for the thread that runs it

    def run(self, device_passed: Mark) -> float | None:
        """Run the update. Return the seconds that the processor took; None if the blocks do not get to the host tier."""
        device_passed.wait()  # user code may have had the device change gradients where they wait
        addresses = self._pager.lending.lend_memory(self._blocks)
        if addresses is None:
            return None
        began = time.perf_counter()
        try:
            with annotate("update", lambda: f"{first_of([block.name for block in self._blocks])} on the host"):
                self.update(dict(zip(self._blocks, addresses, strict=True)))
        finally:
            self._pager.lending.give_back(self._blocks)
        return time.perf_counter() - began

    def update(self, address_of: Mapping[Block, int]) -> None:
        """Run the optimizer's arithmetic over the blocks, which lie at these addresses."""
        fused = self._facts.fused_on_host({member.owned.tensor.dtype for member in self._members})
        # With masters one by one, since each takes memory for its gradient in fp32.
        batches = [[member] for member in self._members] if self._facts.keeps_masters else [self._members]
        for batch in batches:
            update_replicas(self._facts, [member.replica(address_of) for member in batch], fused=fused)


class HostUpdates:
    """Runs updates in one thread, in the order in which they are begun, see [Note: Updates on the host].

    threads: that compute an update; None: as many as PyTorch uses.
    """

    def __init__(self, pager: Pager, *, threads: int | None = None) -> None:
        self._pager = pager
        self._threads = threads
        self._thread: ThreadPoolExecutor | None = None
        self._counters = HostCounters()

    def begin(self, facts: OptimizerFacts, parameters: Iterable[OwnedParameter]) -> HostUpdate | None:
        """Begin the update of those of the parameters that consist of blocks; None if it cannot run on the host now.

        For the training thread, in a region. Waits only for counters on the device whose value is not known on the host.
        """
        if facts.off_host_because is not None:
            return None
        if self._thread is None:  # which starts its thread at the first update
            self._thread = compute_pool(1, self._threads, "teraio-host-update")
        members = [member for owned in parameters if (member := self._member(facts, owned)) is not None]
        update = HostUpdate(facts, members, self._pager, self._counters)
        return update if update.begin(self._thread) else None

    def close(self) -> None:
        """Wait until no update runs any more."""
        if self._thread is not None:
            self._thread.shutdown()

    def _member(self, facts: OptimizerFacts, owned: OwnedParameter) -> HostMember | None:
        """Return the parameter if the host can update it: memory alone tells its value and that of all states."""
        parameter = owned.tensor
        if not facts.updates_alone(parameter):  # see [Note: Several ranks]
            return None
        if parameter.grad is None or facts.sizes_made(parameter):
            return None
        state = facts.optimizer.state.get(parameter, {})
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        if len(tensors) < len(state):  # such as a momentum of None: what an update puts there would not come back
            return None
        large = [parameter, parameter.grad, *(t for t in tensors if moves(bytes_of(t)))]
        blocks = [(block, t) for t in large if (block := self._pager.known_block(t)) is not None and block.span is not None]
        if len(blocks) < len(large) or any(t.is_conj() or t.is_neg() for t in large):
            return None
        if holder_of(parameter.grad).size() != holder_of(parameter).size():
            return None  # a DTensor that is sharded in another way: the update on the device redistributes it
        small = tuple((t, self._counters.here(t)) for t in tensors if not moves(bytes_of(t)))
        return HostMember(owned=owned, blocks=tuple(blocks), state=state, small=small)


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
        """Write back to each state what an update has left in its second tensor, the one that `here` gave."""
        # Numbers on a device, such as AdamW's steps, are written there by kernels that get the value as an argument: a copy from
        # ordinary main memory would wait for the device, once for each parameter. Equal ones share a kernel.
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


class HostRates:
    """Seconds to update one element, by kind of optimizer and precision. Each is measured once.

    shared: whether the device computes on the same processor; then an update is measured while another one runs.
    threads: that compute an update; None: as many as PyTorch uses.
    """

    threads: int | None = None

    def __init__(self, scratch: Scratch, *, shared: bool, threads: int | None = None) -> None:
        self._scratch = scratch
        self.threads = threads
        self._copies = 2 if shared else 1
        self._seconds: dict[object, float] = {}
        self._attempts: dict[object, int] = defaultdict(int)

    def seconds(self, facts: OptimizerFacts, dtype: torch.dtype, elements: int) -> float | None:
        """Return the seconds for so many elements; None if the update cannot run on the host, or there was no room to measure it.

        Waits for some updates the first time.
        """
        if facts.off_host_because is not None:
            return None
        key = facts.name, dtype, facts.states_per_parameter, facts.keeps_masters
        if key not in self._seconds and self._attempts[key] < _ATTEMPTS:
            self._attempts[key] += 1
            measured = self._measure(facts, dtype)
            if measured is not None:
                self._seconds[key] = measured
        each = self._seconds.get(key)
        return None if each is None else each * elements

    def _measure(self, facts: OptimizerFacts, dtype: torch.dtype) -> float | None:
        for count in _ELEMENTS:
            with ExitStack() as last:
                updates = [last.enter_context(self._update(facts, dtype, count)) for _ in range(self._copies)]
                ready = [update for update in updates if update is not None]
                if len(ready) == len(updates):
                    return _seconds_together(ready, self.threads) / count
        return None

    @contextmanager
    def _update(self, facts: OptimizerFacts, dtype: torch.dtype, count: int) -> Iterator[Callable[[], None] | None]:
        """Give an update of `count` elements that can be repeated; None if there is no room for it."""
        fused = facts.fused_on_host([dtype])
        tiny = torch.ones(2, dtype=dtype, device="cpu")
        tiny.grad = torch.ones_like(tiny)
        states: dict[str, Any] = {}
        update_replicas(facts, [Replica(group=0, parameter=tiny, state=states)], fused=fused)  # tells which states there are
        large = {name: value for name, value in states.items() if isinstance(value, Tensor) and value.numel() == tiny.numel()}
        itemsize = max(dtype.itemsize, *(value.element_size() for value in large.values()), 1)
        each = align_up(count * itemsize)
        with self._scratch(each * (2 + len(large))) as address:
            if address is None:
                yield None
                return
            places = iter(range(address, address + each * (2 + len(large)), each))

            def filled(like: Tensor) -> Tensor:
                return tensor_at(next(places), torch.empty(count, dtype=like.dtype, device="meta")).fill_(0.5)

            parameter = filled(tiny)
            parameter.grad = filled(tiny)
            state = states | {name: filled(value) for name, value in large.items()}
            replica = Replica(group=0, parameter=parameter, state=state)
            yield functools.partial(update_replicas, facts, [replica], fused=fused)


def _seconds_together(updates: list[Callable[[], None]], compute_threads: int | None) -> float:
    """Return the shortest time in which updates that begin together all end. Raises what one raised, after all have ended."""
    begin = threading.Barrier(len(updates))

    def run(update: Callable[[], None]) -> float:
        begin.wait()
        began = time.perf_counter()
        update()
        return time.perf_counter() - began

    each = None if compute_threads is None else compute_threads * len(updates)
    with compute_pool(len(updates), each) as threads:  # the same for all runs: torch gives each of them threads of its own
        return min(max(threads.map(run, updates)) for _ in range(_RUNS))


def host_threads(local_ranks: int) -> int | None:
    """Return this rank's share of the cores that control groups leave; None if PyTorch has as many compute threads itself."""
    if local_ranks == 1:
        return None
    cores = max(min(int(machine_cores() / local_ranks), len(os.sched_getaffinity(0))), 1)
    return cores if cores > torch.get_num_threads() else None


def compute_pool(workers: int, threads: int | None, name: str = "") -> ThreadPoolExecutor:
    """Return a pool whose threads compute with so many threads each; None: as PyTorch has it. Waits until they have begun."""
    # torchrun gives each process one compute thread (OMP_NUM_THREADS=1): right beside a GPU, and wrong for updates on the host.
    if threads is None:
        return ThreadPoolExecutor(workers, thread_name_prefix=name)
    # PyTorch's number of compute threads belongs to the thread that sets it, and to threads that begin to compute later.
    before = torch.get_num_threads()
    each = max(threads // workers, 1)

    def begin() -> None:
        torch.get_num_threads()  # PyTorch sets the number of a new thread at its first call
        torch.set_num_threads(each)

    pool = ThreadPoolExecutor(workers, thread_name_prefix=name, initializer=begin)
    for begun in [pool.submit(torch.get_num_threads) for _ in range(workers)]:
        begun.result()
    torch.set_num_threads(before)
    return pool
