"""Masters on a device with streams, whose memory is exchanged when they leave and come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.cuda import StreamMover
from runtime.paging import State, Tier, Tiers

from ...runtime.simulated_device import SimulatedDevice
from ...runtime.slab import Slab
from .managed_training import Start
from .plain_training import WIDE, Textbook, differences, half_parameters, keeping, set_most_gradients
from .test_streams import Gpu


@pytest.mark.parametrize("seed", range(3))
def test_masters_leave_for_the_host_and_come_back(started: Start, seed: int) -> None:
    """In another place each time, with the same bits; user code saves them and writes to parameters meanwhile."""
    device = SimulatedDevice(seed, pieces=64, unit=WIDE)
    slab = Slab(64, WIDE)
    mover = StreamMover(device, Tiers([Tier(name="host", store=slab, engine=None)]), slab.address_of)
    training = started(budget_bytes=12 * WIDE, device=Gpu(device), mover=mover, parameters=half_parameters(torch.bfloat16))
    acquire = training.pager.acquire

    def acquire_and_arrive(*args: Any, **more: Any) -> None:
        acquire(*args, **more)
        device.synchronise()

    training.pager.acquire = acquire_and_arrive  # type: ignore[method-assign]
    optimizer = keeping(torch.optim.AdamW(training.parameters))
    expected = Textbook(half_parameters(torch.bfloat16), torch.optim.AdamW)
    away: set[str] = set()
    for step in range(6):
        set_most_gradients(training.parameters, step)
        optimizer.step()
        expected.train(1, step)
        device.synchronise()
        away |= {name for name, block in training.states().items() if block.state is State.OFFLOADED}
        assert differences(optimizer, expected) == []
        if step == 3:
            training.parameters[2].data.mul_(2)
            expected.masters[2].copy_(training.parameters[2].detach())
    assert sum(name.endswith("master_param") for name in away) >= 3, away
    assert training.pager.account.peak_bytes <= 12 * WIDE
