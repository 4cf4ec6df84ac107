"""Blocks that are updated in slices in their tier, on a device that runs its lanes in any order that their events allow.

Stages, hints, freed blocks and user code come between, as in `test_mover`. All must see the bytes that were written last.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from planner.errors import ChecksumError
from runtime.cuda.host_copies import QueuedRange
from runtime.device import Lane
from runtime.storage import ALIGNMENT_BYTES

from ..block_machine import SLICES, TIERS
from ..simulated_device import SimulatedDevice, SimulatedEvent
from ..simulated_machine import SimulatedMachine, SteppedTransfer

UNIT = SLICES * ALIGNMENT_BYTES
MODES = pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])


def run(
    seed: int, tiers: Sequence[str], *, debug: bool = False, device: type[SimulatedDevice] = SimulatedDevice, regions: int = 12
) -> SimulatedMachine:
    machine = SimulatedMachine(
        seed, budget_blocks=random.Random(seed).randint(4, 7), tiers=tiers, debug=debug, unit=UNIT, device=device, lends=True
    )
    try:
        machine.run(regions)
        return machine
    finally:
        machine.mover.close()


@MODES
@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
@pytest.mark.parametrize("seed", range(10))
def test_any_sequence_in_any_order(seed: int, tiers: Sequence[str], debug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    updates = []
    update = SimulatedMachine.update
    monkeypatch.setattr(SimulatedMachine, "update", lambda machine: (updates.append(1), update(machine)))
    machine = run(seed, tiers, debug=debug)
    assert len(updates) > 5 and machine.pager.account.evictions > len(updates)
    machine.tensors.clear()
    machine.device.synchronise()
    machine.pager.forget_dead()
    assert machine.slab.used_bytes == machine.files.used_bytes == 0, "every slot came back"


class Deaf(SimulatedDevice):
    """A device on which copies do not wait for computation: `lane` is OUTWARD or INWARD."""

    lane = Lane.OUTWARD

    def wait(self, lane: Lane, event: SimulatedEvent) -> None:
        if lane is not self.lane:
            super().wait(lane, event)


class DeafInward(Deaf):
    lane = Lane.INWARD


def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computation continues before a slice has arrived."""
    monkeypatch.setattr(QueuedRange, "wait", lambda self: None)


def drives_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SteppedTransfer, "wait", lambda self: None)


@pytest.mark.parametrize(
    ("break_rule", "device", "tiers"),
    [
        pytest.param(None, Deaf, ("host",), id="rule 1"),
        pytest.param(None, DeafInward, ("host",), id="rule 2"),
        pytest.param(nobody_waits, SimulatedDevice, ("host",), id="rule 3"),
        pytest.param(drives_are_not_waited_for, SimulatedDevice, ("storage",), id="drives"),
    ],
)
def test_every_wait_is_needed(
    break_rule: Callable[[pytest.MonkeyPatch], None] | None,
    device: type[SimulatedDevice],
    tiers: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the wait, a slice has wrong bytes in some order of events."""
    if break_rule is not None:
        break_rule(monkeypatch)
    for seed in range(60):
        try:
            run(seed, tiers, device=device, regions=6)
        except (AssertionError, ChecksumError) as error:
            if "slice" in str(error) and "instead of" in str(error):
                return
    pytest.fail("nothing noticed that the rule was broken")
