"""How long updates take on the host's processor: measured over scratch memory in the host tier, where they would run."""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runtime.storage import align_up
from teraio.optimizer.capabilities import fused_on_host, keeps_masters, reason_against_host, states_per_parameter
from teraio.optimizer.host import tensor_at
from teraio.optimizer.masters import update_replicas
from teraio.optimizer.replica import Replica, by_group

Scratch = Callable[[int], AbstractContextManager[int | None]]
"""Gives memory of so many bytes in the host tier for a while: its address, None if there is none."""

_MAX_ELEMENTS = 4 << 20
_LEAST_ELEMENTS = 64 << 10
_RUNS = 3
_ATTEMPTS = 32
"""So often room is looked for: the host tier is full now and then."""


class HostRates:
    """Seconds of an element's update, by kind of optimizer and precision; each is measured once.

    shared: the device computes on the same processor, so that an update is measured beside another one.
    """

    def __init__(self, scratch: Scratch, *, shared: bool) -> None:
        self._scratch = scratch
        self._copies = 2 if shared else 1
        self._seconds: dict[object, float] = {}
        self._attempts: dict[object, int] = defaultdict(int)

    def seconds(self, optimizer: Optimizer, dtype: torch.dtype, elements: int) -> float | None:
        """For so many elements; None if it cannot run on the host, or there was no room yet to measure it.

        Blocks for some updates the first time.
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
        count = _MAX_ELEMENTS
        while count >= _LEAST_ELEMENTS:
            with ExitStack() as last:
                updates = [last.enter_context(self._update(optimizer, dtype, count)) for _ in range(self._copies)]
                ready = [update for update in updates if update is not None]
                if len(ready) == len(updates):
                    return _seconds_together(ready) / count
            count //= 4
        return None

    @contextmanager
    def _update(self, optimizer: Optimizer, dtype: torch.dtype, count: int) -> Iterator[Callable[[], None] | None]:
        """An update of `count` elements that can be repeated; None if there is no room for it."""
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
    """The states that an update makes, of a parameter with two elements."""
    parameter = torch.ones(2, dtype=dtype, device="cpu")
    parameter.grad = torch.ones_like(parameter)
    state: dict[str, Any] = {}
    groups = by_group(optimizer, [(0, Replica(parameter=parameter, state=state))])
    update_replicas(optimizer, groups, fused=fused_on_host(optimizer, [dtype]))
    return state


def _like(state: Tensor, count: int) -> Tensor:
    return torch.empty(count, dtype=state.dtype, device="meta")


def _seconds_together(updates: list[Callable[[], None]]) -> float:
    """Seconds until all have ended that begin together, at best. Raises what one of them raised, when all have ended."""
    begin = threading.Barrier(len(updates))

    def run(update: Callable[[], None]) -> float:
        begin.wait()
        began = time.perf_counter()
        update()
        return time.perf_counter() - began

    with ThreadPoolExecutor(len(updates)) as threads:  # the same ones for all runs: each has threads of torch's own
        return min(max(threads.map(run, updates)) for _ in range(_RUNS))
