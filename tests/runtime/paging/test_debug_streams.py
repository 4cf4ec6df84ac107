"""The debug mode on a device with streams: poison in the order of its lanes, hashes of what a stage would see."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable

import pytest

from planner.errors import ChecksumError, StorageError, UnsupportedError
from runtime.device import Lane
from runtime.paging import POISON, Block, State
from runtime.storage import Slot

from ..simulated_machine import UNIT, SimulatedMachine

POISONED = bytes([POISON])


def slot_of(block: Block) -> Slot:
    assert block.slot is not None
    return block.slot


def away(machine: SimulatedMachine, tier: str) -> Block:
    """Make a block and send it away, in a region that goes on."""
    machine.pager.enter_region()
    block = machine.made()
    machine.pager.offload(block, tier)  # type: ignore[arg-type]
    while machine.drive.finish():
        pass
    machine.device.synchronise()
    machine.pager.forget_dead()
    assert block.state is State.OFFLOADED and block.tier == tier
    return block


@pytest.mark.parametrize("seed", range(8))
def test_memory_that_a_block_gives_up_between_regions_is_poisoned_before_user_code_gets_it(seed: int) -> None:
    machine = SimulatedMachine(seed, budget_blocks=1, tiers=("storage",), debug=True)
    machine.slow(Lane.COMPUTE)
    with machine.device.region():
        machine.pager.enter_region()
        block = machine.made()
        address = block.address
        machine.pager.offload(block, "storage")
        machine.pager.leave_region()
    machine.device.synchronise()
    assert machine.drive.finish() and block.state is State.OFFLOADED
    assert ctypes.string_at(address, UNIT) == POISONED * UNIT
    users = machine.device.allocate(UNIT)
    assert users.data_ptr() == address, "there is no other"
    machine.device.queue(Lane.USER, lambda: ctypes.memset(address, 7, UNIT) and None)
    machine.device.synchronise()
    assert ctypes.string_at(address, UNIT) == bytes([7]) * UNIT
    machine.mover.close()


@pytest.mark.parametrize("tier", ["host", "storage"])
def test_memory_is_poisoned_before_a_copy_in(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SimulatedMachine(0, budget_blocks=2, tiers=(tier,), debug=True)
    with machine.device.region():
        block = away(machine, tier)
        monkeypatch.setattr(machine.device, "copy", lambda lane, **_: None)
        monkeypatch.setattr(ctypes, "memmove", lambda *_: None)
        with pytest.raises(ChecksumError, match=rf"block '{block.name}' in .* \({tier} tier\)"):
            machine.pager.acquire([block], 0, "read")
        assert ctypes.string_at(block.address, UNIT) == POISONED * UNIT
    machine.mover.close()


def test_memory_of_a_copy_in_that_failed_is_not_poisoned_once_others_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise StorageError("the drive is gone")

    machine = SimulatedMachine(0, budget_blocks=1, tiers=("storage",), debug=True)
    with machine.device.region():
        block = away(machine, "storage")
        machine.slow(Lane.INWARD)
        monkeypatch.setattr(machine.drive, "read", refuse)
        with pytest.raises(StorageError, match="the drive is gone"):
            machine.pager.acquire([block], 0, "read")
        gc.collect()  # the error's traceback holds the memory
        other = machine.made()
        machine.device.synchronise()
        machine.kernel(Lane.COMPUTE, other, None)
    machine.device.synchronise()
    assert not machine.wrong
    machine.mover.close()


def test_a_damaged_slab_is_found() -> None:
    machine = SimulatedMachine(0, budget_blocks=2, tiers=("host",), debug=True)
    with machine.device.region():
        block = away(machine, "host")
        (extent,) = slot_of(block).extents
        ctypes.memset(machine.slab.address_of(extent) + UNIT - 1, 0xAA, 1)
        with pytest.raises(ChecksumError, match=re.escape(f"in slab (host tier) from offset {extent.offset_bytes} on")):
            machine.pager.acquire([block], 0, "read")
    machine.mover.close()


def by_the_next_region(machine: SimulatedMachine) -> None:
    with machine.device.region():
        machine.pager.enter_region()
        (block,) = machine.tensors
        machine.pager.acquire([block], 0, "read")


def all_at_once(machine: SimulatedMachine) -> None:
    with machine.device.region():
        machine.pager.bring_back_all()


@pytest.mark.parametrize("come_back", [by_the_next_region, all_at_once])
def test_what_user_code_writes_to_the_host_tier_is_no_damage(come_back: Callable[[SimulatedMachine], None]) -> None:
    machine = SimulatedMachine(0, budget_blocks=2, tiers=("host",), debug=True)
    with machine.device.region():
        block = away(machine, "host")
        block.user_visible = True
        machine.pager.leave_region()
    machine.kernel(Lane.USER, block, 99)
    come_back(machine)
    machine.kernel(Lane.COMPUTE, block, None)
    machine.device.synchronise()
    assert not machine.wrong and block.state is State.ON_DEVICE
    machine.mover.close()


@pytest.mark.parametrize("tier", ["host", "storage"])
def test_what_user_code_can_reach_is_compared_within_a_region(tier: str) -> None:
    """Parameters too: user code can write to what stands in for them only between regions."""
    machine = SimulatedMachine(0, budget_blocks=2, tiers=(tier,), debug=True)
    with machine.device.region():
        block = away(machine, tier)
        block.user_visible = True
        if tier == "storage":
            machine.pager.leave_region()  # nobody can write to it there
            machine.pager.enter_region()
            machine.drive.content[machine.drive.place(slot_of(block))] = bytes(UNIT)
        else:
            ctypes.memset(machine.slab.address_of(slot_of(block).extents[0]), 0, UNIT)
        with pytest.raises(ChecksumError):
            machine.pager.acquire([block], 0, "read")
    machine.mover.close()


def test_what_is_made_anew_is_compared_with_what_was_dropped() -> None:
    machine = SimulatedMachine(0, budget_blocks=2, tiers=("storage",), debug=True)
    with machine.device.region():
        machine.pager.enter_region()
        block = machine.made()
        block.source = object()
        machine.device.synchronise()
        content = ctypes.string_at(block.address, UNIT)
        machine.pager.drop(block)
        machine.device.synchronise()
        fresh = machine.device.allocate(UNIT)
        ctypes.memset(fresh.data_ptr(), content[0] ^ 1, UNIT)
        with pytest.raises(UnsupportedError, match=f"{block.name} was recomputed with other bytes"):
            machine.pager.renew({block: fresh})
        assert block.state is State.DROPPED
        ctypes.memmove(fresh.data_ptr(), content, UNIT)
        machine.pager.renew({block: fresh})
        machine.pager.acquire([block], 0, "read")
    machine.mover.close()
