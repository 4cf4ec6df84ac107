"""The debug mode: poison is where it should be, and an error says where the damage is. What it finds: `test_movers.py`."""

from __future__ import annotations

import ctypes
import gc
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from planner.errors import ChecksumError, StorageError
from runtime.device import Lane, Span
from runtime.paging import POISON, Block, State
from runtime.system import storage_swap

from ..cpu_machine import MIB, CpuMachine, Drive, slot_of
from ..memory import flip_a_bit
from ..simulated_machine import UNIT, SimulatedMachine

POISONED = bytes([POISON])

# -- in main memory


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[CpuMachine]:
    rig = CpuMachine(tmp_path, debug=True)
    yield rig
    rig.close()


def test_pages_that_a_block_gives_up_are_poisoned_unless_user_code_may_be_reading_them(rig: CpuMachine) -> None:
    """They go back to the system then, when the slot takes their place."""
    seen, visible = rig.make(4 * MIB, 8)
    visible.user_visible = True
    rig.leave(visible)
    assert rig.memory.kept_bytes == 0
    tensor, block = rig.make(4 * MIB, 7)
    rig.leave(block)
    assert rig.memory.kept_bytes == 4 * MIB
    fresh = torch.empty(4 * MIB, dtype=torch.uint8)
    assert rig.memory.kept_bytes == 0, "these are the pages"
    assert fresh.unique().tolist() == [POISON]
    assert seen.unique().tolist() == [8] and tensor.unique().tolist() == [7], "what stands in for the blocks is none of them"


def test_what_does_not_arrive_is_poison_and_found_again_and_again(rig: CpuMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, block = rig.make(4 * MIB, 7)
    rig.leave(block)
    rig.memory.trim(0)  # pages that were given up are poisoned already, new ones are not
    monkeypatch.setattr(Drive, "reads", lambda store, chunk: chunk.slot_offset_bytes == 0)
    for _ in range(2):
        with pytest.raises(ChecksumError, match="block 'w' in "):
            rig.use(block)
    with pytest.raises(RuntimeError, match="w was damaged on its way"):
        tensor.sum()
    storage_swap.reopen(tensor.untyped_storage())
    assert tensor[: 2 * MIB].unique().tolist() == [7]
    assert tensor[2 * MIB :].unique().tolist() == [POISON]


def test_the_error_says_where_the_damage_is(folders: list[Path]) -> None:
    rig = CpuMachine(*folders, debug=True)
    _tensor, block = rig.make(4 * MIB, 7, "layers.3.out")
    rig.leave(block)
    _first, second = slot_of(block).extents
    flip_a_bit(second, 5)
    with pytest.raises(ChecksumError) as raised:
        rig.use(block)
    error = raised.value
    assert (error.block, error.tier, error.path) == ("layers.3.out", "storage", str(second.path))
    assert error.offset_bytes == second.offset_bytes and error.expected != error.found
    for part in (
        f"block 'layers.3.out' in {second.path} (storage tier) from offset {second.offset_bytes} on came back different",
        f"its checksum was {error.expected:016x} and is {error.found:016x}; teraio has lost it on the way",
        "run again with the option checksums",
    ):
        assert part in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and vars(copy) == vars(error)
    rig.close()


def test_damage_after_the_drive_has_done_its_work(rig: CpuMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checksum would not find it: it follows a piece only until it is in memory."""
    tensor, block = rig.make(4 * MIB, 7)
    rig.leave(block)
    install = rig.memory.install_pages

    def install_wrongly(source: Span, target: Span) -> None:
        install(source, target)
        tensor[3 * MIB] = 8

    monkeypatch.setattr(rig.memory, "install_pages", install_wrongly)
    with pytest.raises(ChecksumError):
        rig.use(block)


# -- on a device with streams


def away(machine: SimulatedMachine, tier: str) -> Block:
    """Make a block and send it away, in a region that goes on."""
    machine.pager.enter_region()
    block = machine.made()
    machine.pager.offload(block, tier)  # type: ignore[arg-type]
    machine.finish_queued()
    machine.pager.forget_dead()
    assert block.state is State.OFFLOADED and block.tier == tier
    return block


@pytest.mark.parametrize("seed", range(8))
def test_memory_that_a_block_gives_up_between_regions_is_poisoned_before_user_code_gets_it(seed: int) -> None:
    machine = SimulatedMachine(seed, budget_blocks=1, tiers=("storage",), debug=True)
    machine.slow(Lane.COMPUTE)
    with machine.in_region():
        block = machine.made()
        address = block.address
        machine.pager.offload(block, "storage")
    machine.device.synchronise()
    assert machine.drive.finish() and block.state is State.OFFLOADED
    assert ctypes.string_at(address, UNIT) == POISONED * UNIT
    users = machine.device.allocate(UNIT)
    assert users.data_ptr() == address, "there is no other"
    machine.device.queue(Lane.USER, lambda: ctypes.memset(address, 7, UNIT) and None)
    machine.device.synchronise()
    assert ctypes.string_at(address, UNIT) == bytes([7]) * UNIT
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
