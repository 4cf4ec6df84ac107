"""Optimizer states on a device with streams, whose memory is exchanged when they leave and come back."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from runtime.cuda import StreamMover
from runtime.device import Lane, WallMark
from runtime.paging import State, Tier, Tiers

from ...runtime.simulated_device import SimulatedDevice
from ...runtime.slab import Slab
from .managed_training import Start
from .plain_training import SIZE, everything, plain, same


class Gpu:
    """A simulated device as a `Device`.

    Optimizers compute at once here, and what they allocate is freed at once: copies in end when a stage begins, copies out
    when they are queued.
    """

    asynchronous = True

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        queue = device.copy

        def copy(lane: Lane, **what: int) -> None:
            queue(lane, **what)
            if lane is Lane.OUTWARD:
                device.synchronise()

        device.copy = copy  # type: ignore[method-assign]

    def region(self) -> AbstractContextManager[None]:
        return self.device.region()

    def mark(self) -> WallMark:
        return WallMark(float(self.device.steps))

    def try_memory(self, size_bytes: int) -> None:
        """There always is some."""

    def trim(self, spare_bytes: int) -> None:
        """Nothing is kept for reuse."""

    def external_bytes(self, known_bytes: int) -> int:
        return 0


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_states_leave_for_the_host_and_come_back(started: Start, seed: int, whole: bool) -> None:
    """In another place each time, with the same bits; user code reads them where they wait."""
    budget_blocks = 30 if whole else 12
    device = SimulatedDevice(seed, pieces=64, unit=SIZE)
    slab = Slab(64, SIZE)
    mover = StreamMover(device, Tiers([Tier(name="host", store=slab, engine=None)]), slab.address_of)
    training = started(budget_bytes=budget_blocks * SIZE, device=Gpu(device), mover=mover)
    acquire = training.pager.acquire

    def acquire_and_arrive(*args: Any, **more: Any) -> None:
        acquire(*args, **more)
        device.synchronise()

    training.pager.acquire = acquire_and_arrive  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(training.parameters)
    if whole:
        optimizer.register_step_pre_hook(lambda *_: None)
    away: set[str] = set()
    for step in range(5):
        training.train(optimizer, 1, first=step)
        device.synchronise()
        if whole:  # then nothing would have to leave by itself
            with device.region():
                training.pager.enter_region()
                for block in training.states().values():
                    training.pager.offload(block)
                training.pager.leave_region()
            device.synchronise()
        away |= {name for name, block in training.states().items() if block.state is State.OFFLOADED}
        assert same(everything(optimizer), plain(step + 1))
    assert len(away) >= 6
    assert training.pager.account.peak_bytes <= budget_blocks * SIZE
    mover.close()  # storages of later tests may have the keys of these
