"""How long updates take on the host's processor, measured over scratch memory in the host tier."""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runtime.storage import align_up
from teraio.optimizer.capabilities import fused_on_host, keeps_masters, reason_against_host, states_per_parameter
from teraio.optimizer.host import tensor_at
from teraio.optimizer.host_threads import compute_pool
from teraio.optimizer.masters import update_replicas
from teraio.optimizer.replica import Replica, by_group

Scratch = Callable[[int], AbstractContextManager[int | None]]
"""Gives memory of so many bytes in the host tier for a while: its address, or None if there is no room."""

MAX_ELEMENTS = 4 << 20
"""Elements of a measured update; fewer if the host tier has less room."""
_MIN_ELEMENTS = 64 << 10
_RUNS = 3
_ATTEMPTS = 32
"""How often to look for room, since the host tier may be full for a while."""


class HostRates:
    """Seconds to update one element, by kind of optimizer and precision. Each is measured once.

    shared: whether the device computes on the same processor; then an update is measured while another one runs.
    max_elements: of a measured update. threads: that compute an update; None: as many as PyTorch uses.
    """

    threads: int | None = None

    def __init__(self, scratch: Scratch, *, shared: bool, max_elements: int = MAX_ELEMENTS, threads: int | None = None) -> None:
        self._scratch = scratch
        self.threads = threads
        self._max_elements = max_elements
        self._copies = 2 if shared else 1
        self._seconds: dict[object, float] = {}
        self._attempts: dict[object, int] = defaultdict(int)

    def seconds(self, optimizer: Optimizer, dtype: torch.dtype, elements: int) -> float | None:
        """Return the seconds for so many elements; None if the update cannot run on the host, or there was no room to measure it.

        Waits for some updates the first time.
        """
        if reason_against_host(optimizer) is not None:
            return None
        key = type(optimizer), dtype, states_per_parameter(optimizer), keeps_masters(optimizer)
        if key not in self._seconds and self._attempts[key] < _ATTEMPTS:
            self._attempts[key] += 1
            measured = self._measure(optimizer, dtype)
            if measured is not None:
                self._seconds[key] = measured
        each = self._seconds.get(key)
        return None if each is None else each * elements

    def _measure(self, optimizer: Optimizer, dtype: torch.dtype) -> float | None:
        count = self._max_elements
        while count >= _MIN_ELEMENTS:
            with ExitStack() as last:
                updates = [last.enter_context(self._update(optimizer, dtype, count)) for _ in range(self._copies)]
                ready = [update for update in updates if update is not None]
                if len(ready) == len(updates):
                    return _seconds_together(ready, self.threads) / count
            count //= 4
        return None

    @contextmanager
    def _update(self, optimizer: Optimizer, dtype: torch.dtype, count: int) -> Iterator[Callable[[], None] | None]:
        """Give an update of `count` elements that can be repeated; None if there is no room for it."""
        names = _states_of_one_element(optimizer, dtype)
        large = [name for name, value in names.items() if isinstance(value, Tensor) and value.numel() == 2]
        each = align_up(count * max(dtype.itemsize, *(names[name].element_size() for name in large), 1))
        with self._scratch(each * (2 + len(large))) as address:
            if address is None:
                yield None
                return
            places = iter(range(address, address + each * (2 + len(large)), each))
            replica = tensor_at(next(places), torch.empty(count, dtype=dtype, device="meta")).fill_(0.5)
            replica.grad = tensor_at(next(places), replica).fill_(0.5)
            state = {n: tensor_at(next(places), _like(names[n], count)).fill_(0.5) for n in large}
            groups = by_group(optimizer, [(0, Replica(parameter=replica, state=names | state))])
            yield functools.partial(update_replicas, optimizer, groups, fused=fused_on_host(optimizer, [dtype]))


def _states_of_one_element(optimizer: Optimizer, dtype: torch.dtype) -> dict[str, Any]:
    """Return the states that an update makes for a parameter with two elements."""
    parameter = torch.ones(2, dtype=dtype, device="cpu")
    parameter.grad = torch.ones_like(parameter)
    state: dict[str, Any] = {}
    groups = by_group(optimizer, [(0, Replica(parameter=parameter, state=state))])
    update_replicas(optimizer, groups, fused=fused_on_host(optimizer, [dtype]))
    return state


def _like(state: Tensor, count: int) -> Tensor:
    return torch.empty(count, dtype=state.dtype, device="meta")


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
