"""How updates on the host are measured where there is no room at first, and where they fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import planner
from teraio.optimizer import HostRates, OptimizerFacts, host

from ..parity.optimizers import MIB, Case, one, train, unmanaged

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


def adam() -> OptimizerFacts:
    return OptimizerFacts.of(KEPT)


@pytest.fixture(autouse=True)
def few_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_MAX_ELEMENTS", FEW)


def test_a_host_tier_that_is_full_at_first_is_measured_later() -> None:
    room = Room()
    rates = HostRates(room, shared=False)
    room.there = False
    assert rates.seconds(adam(), torch.float32, 1000) is None
    room.there = True
    seconds = rates.seconds(adam(), torch.float32, 1000)
    assert seconds is not None and 0 < seconds < 1
    asked = room.asked
    assert rates.seconds(adam(), torch.float32, 2000) == 2 * seconds and room.asked == asked


def test_room_is_not_looked_for_for_ever() -> None:
    room = Room()
    room.there = False
    rates = HostRates(room, shared=False)
    for _ in range(100):
        assert rates.seconds(adam(), torch.float32, 1000) is None
    assert room.asked < 50


@pytest.mark.parametrize("which", [0, 1])
def test_an_update_that_fails_while_it_is_measured_says_so(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
        HostRates(room, shared=True).seconds(adam(), torch.float32, 1000)
    assert still_there and set(still_there) == {2} and room.held == 0


@pytest.mark.long
def test_a_host_tier_that_blocks_fill_on_demand(tmp_path: Path) -> None:
    """What they left behind there when they came back makes room."""
    case = Case(make=one(torch.optim.AdamW), steps=5, layers=4)
    budget = int(0.45 * unmanaged(case, tmp_path).status.device_peak_bytes)
    trace = tmp_path / "trace.json"
    train(
        case,
        tmp_path,
        {
            "memory_budget": budget,
            "host_budget": 8 * MIB,
            "storage": str(tmp_path),
            "trace_out": trace,
            "profile_iterations": 1,
        },
    )
    assert all(subgroup.host_seconds for subgroup in planner.Trace.load(trace).subgroups)
