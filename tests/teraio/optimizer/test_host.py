"""Updates on the host: what they know of a device's small states, what keeps them there, threads, and measured rates."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from teraio.optimizer import HostRates, OptimizerFacts, host, owned_parameters
from teraio.optimizer.host import HostCounters, HostUpdates, compute_pool, host_threads

from .plain_training import keeping


class OnDevice(Tensor):
    """A tensor of main memory that says it is elsewhere. `copies`, `copies_back`: how often it was copied from and to there."""

    copies = copies_back = 0

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")

    def cpu(self) -> Tensor:  # type: ignore[override]
        OnDevice.copies += 1
        return self.as_subclass(Tensor).clone()

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        OnDevice.copies_back += 1
        return super().copy_(source, non_blocking)


@pytest.fixture
def state() -> Tensor:
    OnDevice.copies = OnDevice.copies_back = 0
    return torch.zeros(()).as_subclass(OnDevice)


def test_a_counter_is_copied_from_the_device_once(state: Tensor) -> None:
    counters = HostCounters()
    for step in range(3):
        here = counters.here(state)
        assert here == step
        here += 1
        counters.update([(state, here)])
    assert state == 3 and OnDevice.copies == 1 and OnDevice.copies_back == 0
    counters.update([(several := torch.zeros(2).as_subclass(OnDevice), torch.ones(2))])
    assert several.eq(1).all() and OnDevice.copies_back == 1


@pytest.mark.parametrize("begun", [False, True])
def test_a_counter_that_the_device_has_counted_is_copied_again(state: Tensor, begun: bool) -> None:
    """An update that does not get its blocks is made there, which changes the counter as often as to copy it back does."""
    counters = HostCounters()
    for step in range(3):
        here = counters.here(state)
        assert here == step
        if begun:
            here += 7  # it has failed half-way, say
        torch._foreach_add_([state], 1)
    here = counters.here(state)
    assert here == 3
    here += 1
    counters.update([(state, here)])
    assert state == 4


@pytest.mark.parametrize("setting", ["lr", "betas", "capturable"])
def test_settings_on_the_device_keep_updates_there(setting: str) -> None:
    """A fused update on the CPU would copy them without waiting for the copy."""
    optimizer = torch.optim.AdamW([torch.zeros(4)], lr=torch.tensor(1e-3), fused=True)
    assert OptimizerFacts.of(optimizer).off_host_because is None, "in main memory"
    there = torch.tensor(0.1, device="meta")
    optimizer.param_groups[0][setting] = {"lr": there, "betas": (0.9, there), "capturable": True}[setting]
    assert "on the device" in (OptimizerFacts.of(optimizer).off_host_because or "")


def test_deterministic_algorithms_keep_updates_on_the_device() -> None:
    """From when they are asked for, whatever a plan says that was made before."""
    optimizer = torch.optim.AdamW([torch.zeros(4)])
    torch.use_deterministic_algorithms(True)
    try:
        facts = OptimizerFacts.of(optimizer)
        assert "deterministic" in (facts.off_host_because or "") and HostUpdates(KNOWING).begin(facts, []) is None
    finally:
        torch.use_deterministic_algorithms(False)
    assert OptimizerFacts.of(optimizer).off_host_because is None


KNOWING: Any = SimpleNamespace(known_block=lambda tensor: SimpleNamespace(span=True))
"""Stands in for a pager that knows all tensors."""


def on_host(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the update of its only parameter can run there."""
    return bool(HostUpdates(KNOWING)._member(OptimizerFacts.of(optimizer), owned_parameters(optimizer)[0]))


def test_what_memory_alone_does_not_tell_stays_on_the_device() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.complex64))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.conj().backward(torch.full((4,), 1 + 2j))
    assert parameter.grad is not None and parameter.grad.is_conj() and not on_host(optimizer)
    parameter.grad = parameter.grad.resolve_conj()
    assert on_host(optimizer)


def test_states_that_are_still_to_come_are_made_on_the_device() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    assert not on_host(optimizer)
    optimizer.state[parameter]["momentum_buffer"] = None  # type: ignore[assignment]
    assert not on_host(optimizer)
    optimizer.step()
    assert on_host(optimizer)
    optimizer.state[parameter]["other"] = None  # type: ignore[assignment]
    assert not on_host(optimizer), "an update may put something there"
    half = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    half.grad = torch.ones_like(half)
    keeper = keeping(torch.optim.SGD([half], lr=0.1))
    assert not on_host(keeper), "so is a master, also where that is the only state"
    keeper.step()
    assert on_host(keeper)


# -- updates on the host get a rank's share of the cores, and nothing else does


def test_a_rank_gets_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch, one_compute_thread: None) -> None:
    monkeypatch.setattr(sys.modules[host_threads.__module__], "machine_cores", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert [host_threads(ranks) for ranks in (1, 2, 8, 16, 32)] == [None, 8, 2, None, None]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6})  # a rank that is bound to cores of its own
    assert host_threads(2) == 3


def test_only_the_pool_computes_with_more_threads(one_compute_thread: None) -> None:
    def used() -> int:
        torch.ones(1 << 18).add_(1)
        return torch.get_num_threads()

    with compute_pool(1, 2) as pool, compute_pool(1, None) as plain:
        assert pool.submit(used).result() == 2
        assert used() == plain.submit(used).result() == 1


# -- how updates on the host are measured where there is no room at first, and where they fail


ALIGNMENT = 4096
FEW = 64 << 10


class Room:
    """Scratch memory that there is, or is not. held: how many have some of it now."""

    def __init__(self) -> None:
        self.there = True
        self.asked = self.held = 0

    @contextmanager
    def __call__(self, size_bytes: int) -> Iterator[int | None]:
        self.asked += 1
        if not self.there:
            yield None
            return
        memory = torch.empty(size_bytes + ALIGNMENT, dtype=torch.uint8)
        self.held += 1
        try:
            yield -(-memory.data_ptr() // ALIGNMENT) * ALIGNMENT
        finally:
            self.held -= 1


KEPT = torch.optim.AdamW([torch.zeros(4)])
ADAM = OptimizerFacts.of(KEPT)


@pytest.fixture
def few_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_ELEMENTS", (FEW,))


def test_a_host_tier_that_is_full_at_first_is_measured_later(few_elements: None) -> None:
    room = Room()
    rates = HostRates(room, shared=False)
    room.there = False
    assert rates.seconds(ADAM, torch.float32, 1000) is None
    room.there = True
    seconds = rates.seconds(ADAM, torch.float32, 1000)
    assert seconds is not None and 0 < seconds < 1
    asked = room.asked
    assert rates.seconds(ADAM, torch.float32, 2000) == 2 * seconds and room.asked == asked


@pytest.mark.parametrize("which", [0, 1])
def test_an_update_that_fails_while_it_is_measured_says_so(
    which: int, few_elements: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And memory is given back only when the other one has ended."""
    room, calls, still_there = Room(), [0], []
    lock = threading.Lock()

    def update(*args: object, **others: object) -> None:
        if threading.current_thread() is threading.main_thread():
            return  # makes states
        with lock:
            number = calls[0]
            calls[0] += 1
        if number == which:
            raise ValueError("no such luck")
        time.sleep(0.05)
        still_there.append(room.held)

    monkeypatch.setattr(host, "update_replicas", update)
    with pytest.raises(ValueError, match="no such luck"):
        HostRates(room, shared=True).seconds(ADAM, torch.float32, 1000)
    assert still_there and set(still_there) == {2} and room.held == 0
