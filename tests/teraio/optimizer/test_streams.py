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
from .plain_training import (
    SIZE,
    WIDE,
    Textbook,
    differences,
    everything,
    half_parameters,
    keeping,
    plain,
    same,
    set_gradients,
    set_most_gradients,
    square_parameters,
)


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

    def keep_until_computed(self, storage: torch.UntypedStorage) -> None:
        """It is not freed."""

    def try_memory(self, size_bytes: int) -> None:
        """There always is some."""

    def trim(self, spare_bytes: int) -> None:
        """Nothing is kept for reuse."""

    def external_bytes(self, known_bytes: int) -> int:
        return 0


@pytest.mark.parametrize("kind", ["subgroups", "whole", "masters"])
@pytest.mark.parametrize("seed", range(3))
def test_states_leave_for_the_host_and_come_back(started: Start, seed: int, kind: str) -> None:
    """In another place each time, with the same bits; user code reads them where they wait, and writes to a parameter."""
    whole, unit = kind == "whole", WIDE if kind == "masters" else SIZE
    budget_bytes = (30 if whole else 12) * unit
    device = SimulatedDevice(seed, pieces=64, unit=unit)
    slab = Slab(64, unit)
    mover = StreamMover(device, Tiers([Tier(name="host", store=slab, engine=None)]), slab.address_of)
    parameters = half_parameters(torch.bfloat16) if kind == "masters" else square_parameters(6)
    training = started(budget_bytes=budget_bytes, device=Gpu(device), mover=mover, parameters=parameters)
    acquire = training.pager.acquire

    def acquire_and_arrive(*args: Any, **more: Any) -> None:
        acquire(*args, **more)
        device.synchronise()

    training.pager.acquire = acquire_and_arrive  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(training.parameters)
    textbook = Textbook(half_parameters(torch.bfloat16), torch.optim.AdamW)
    if kind == "masters":
        keeping(optimizer)
    if whole:
        optimizer.register_step_pre_hook(lambda *_: None)
    away: set[str] = set()
    for step in range(6):
        (set_most_gradients if kind == "masters" else set_gradients)(training.parameters, step)
        optimizer.step()
        textbook.train(1, step)
        device.synchronise()
        if whole:  # then nothing would have to leave by itself
            with device.region():
                training.pager.enter_region()
                for block in training.states().values():
                    training.pager.offload(block)
                training.pager.leave_region()
            device.synchronise()
        away |= {name for name, block in training.states().items() if block.state is State.OFFLOADED}
        if kind != "masters":
            assert same(everything(optimizer), plain(step + 1))
            continue
        assert differences(optimizer, textbook) == []
        if step == 3:
            training.parameters[2].data.mul_(2)
            textbook.masters[2].copy_(training.parameters[2].detach())
    assert len(away) >= 6 and (kind != "masters" or sum(name.endswith("master_param") for name in away) >= 3), away
    assert training.pager.account.peak_bytes <= budget_bytes
    mover.close()  # storages of later tests may have the keys of these
