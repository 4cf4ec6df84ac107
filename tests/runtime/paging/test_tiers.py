"""Which tier a block gets its slot in: the wanted one, else the first with room. Copies that are not needed make room."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from planner.errors import StorageFullError
from planner.schema import WaitingTier
from runtime.device import Span
from runtime.paging import Block, State, Tier, Tiers

from ..cpu_machine import MIB, CpuMachine
from ..simulated_machine import Slab

UNIT = 64


def block(name: str = "w") -> Block:
    storage = torch.zeros(UNIT, dtype=torch.uint8).untyped_storage()
    return Block(held=storage, name=name, kind="activation", user_visible=False, span=Span(0, UNIT))


@pytest.fixture
def stores() -> dict[WaitingTier, Slab]:
    return {"host": Slab("host", 1, UNIT), "storage": Slab("storage", 2, UNIT)}


@pytest.fixture
def tiers(stores: dict[WaitingTier, Slab]) -> Tiers:
    return Tiers([Tier(store=store, engine=None) for store in stores.values()])


def test_a_block_keeps_its_slot_or_changes_to_the_wanted_tier(tiers: Tiers, stores: dict[WaitingTier, Slab]) -> None:
    moving = block()
    tiers.place(moving, "storage")
    slot = moving.slot
    assert tiers.place(moving, None).name == tiers.place(moving, "storage").name == "storage"
    assert moving.slot is slot
    assert tiers.place(moving, "host").name == moving.tier == "host"
    assert (stores["host"].used_bytes, stores["storage"].used_bytes) == (UNIT, 0)
    other = block()
    tiers.place(other, "storage")
    assert tiers.place(other, "host").name == "storage", "host is full: it stays where it is"
    tiers.free(moving)
    tiers.free(moving)
    assert stores["host"].used_bytes == 0 and moving.tier is None


def contents(storage: torch.UntypedStorage) -> set[int]:
    """The bytes that occur in a storage. Its own `tolist` takes seconds for a MiB."""
    return set(torch.tensor([], dtype=torch.uint8).set_(storage).unique().tolist())


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_full_tier_keeps_no_frame_alive(tiers: Tiers, no_collector: None) -> None:
    """Else tensors in the frames of callers would live on, and AccumulateGrad would clone each gradient among them."""
    tiers.place(block(), "host")

    def caller() -> weakref.ref[torch.Tensor]:
        gradient = torch.zeros(1)
        assert tiers.place(block(), "host").name == "storage"
        return weakref.ref(gradient)

    assert caller()() is None


# -- tiers that are smaller than all blocks together: it is enough if they hold those that are away


@pytest.fixture
def rig() -> Iterator[CpuMachine]:
    """Two blocks of 1 MiB fit on the device, three in the host tier."""
    rig = CpuMachine(host_bytes=3 * MIB, budget_bytes=2 * MIB, debug=True)
    yield rig
    rig.pager.closing.bring_back()
    rig.close()


def check(rig: CpuMachine, made: list[tuple[torch.Tensor, Block]], *, writes: bool = False) -> None:
    """Run a stage on each block. It finds all bytes as they were made: the number of the block."""
    for fill, (tensor, block) in enumerate(made):
        rig.use(block, writes=writes)
        assert set(tensor.tolist()) == {fill}


@pytest.mark.parametrize("writes", [True, False], ids=["void copies", "valid copies"])
def test_copies_of_what_is_on_the_device_make_room(rig: CpuMachine, writes: bool) -> None:
    made = [rig.make(MIB, fill) for fill in range(4)]  # two away, two on the device, and room for one on its way out
    for _ in range(3):
        check(rig, made, writes=writes)
    assert rig.store.used_bytes <= 3 * MIB
    assert sum(block.state is State.OFFLOADED for _, block in made) == 2


def test_void_copies_in_the_wanted_tier_make_room_there(tmp_path: Path) -> None:
    """So the block goes to the tier of the plan."""
    rig = CpuMachine(tmp_path, host_bytes=3 * MIB, budget_bytes=4 * MIB, debug=True)
    made = [rig.make(MIB, fill) for fill in range(4)]
    for _, block in made[:3]:
        rig.pager.offload(block, "host")
        rig.use(block, writes=True)
    assert [block.tier for _, block in made] == ["host", "host", "host", None]
    while rig.pager.account.offloading_bytes:  # what is on its way keeps its slot
        time.sleep(0.001)
    tensor, last = made[3]
    rig.pager.offload(last, "host")
    rig.use(last)
    assert last.tier == "host" and set(tensor.tolist()) == {3}
    rig.close()


def test_a_hint_that_finds_no_room_is_passed_over(rig: CpuMachine) -> None:
    made = [rig.make(MIB, fill) for fill in range(5)]
    (here, _) = [block for _, block in made if block.state is State.ON_DEVICE]
    rig.pager.offload(here, "host")
    assert here.state is State.ON_DEVICE
    with pytest.raises(StorageFullError, match="host_budget"):
        rig.make(MIB, 5)


def test_a_slot_is_waited_for_that_a_block_is_being_read_from() -> None:
    rig = CpuMachine(host_bytes=2 * MIB, budget_bytes=3 * MIB, debug=True)
    made = [rig.make(MIB, fill) for fill in range(2)]
    for _, block in made:
        rig.leave(block)
    made += [rig.make(MIB, fill) for fill in (2, 3)]
    with rig.pager.condition:  # the copy does not end before the stage waits
        rig.pager.prefetch(made[0][1])
        assert made[0][1].state is State.PREFETCHING
        rig.pager.acquire([], MIB, "a stage")
    rig.pager.retire([], [])
    check(rig, made)
    rig.close()


def test_a_stage_exchanges_blocks_one_by_one_where_the_lower_tier_is_full() -> None:
    rig = CpuMachine(host_bytes=4 * MIB, budget_bytes=3 * MIB, debug=True)
    made = [rig.make(MIB, fill) for fill in range(4)]
    for _, block in made:
        rig.leave(block)
    made += [rig.make(MIB, fill) for fill in (4, 5)]
    wanted = [block for _, block in made[:3]]
    rig.pager.acquire(wanted, 0, "a stage")
    assert rig.pager.account.peak_bytes <= 3 * MIB
    rig.pager.retire(wanted, [])
    check(rig, made)
    rig.close()


@pytest.mark.parametrize("tier", ["host", "storage"])
def test_a_slot_that_is_read_is_given_to_no_other_block(tier: WaitingTier, tmp_path: Path) -> None:
    rig = CpuMachine(*([tmp_path] if tier == "storage" else ()), host_bytes=4 * MIB if tier == "host" else 0)
    tensor, made = rig.make(MIB, 7)
    rig.leave(made)
    reader = rig.tiers.map(made)
    assert rig.tiers.map(made) is reader, "one storage for all views, so that a checkpoint has it once"
    rig.use(made, writes=True)
    rig.pager.drop_void_copies(tier)
    assert made.slot is None
    _, other = rig.make(MIB, 9)
    rig.leave(other)
    assert contents(reader) == {7} and set(tensor.tolist()) == {7}
    assert rig.store.used_bytes == 2 * MIB
    del reader
    rig.make(MIB, 3)
    rig.pager.offload(made)
    rig.until(made, State.OFFLOADED)
    assert rig.store.used_bytes == 2 * MIB, "what nobody reads is free"
    rig.close()


def test_what_is_read_outlives_the_tiers(tmp_path: Path) -> None:
    rig = CpuMachine(tmp_path, host_bytes=2 * MIB)
    made = [rig.make(MIB, fill) for fill in range(4)]
    for _, block in made:
        rig.leave(block)
    assert [block.tier for _, block in made] == ["host", "host", "storage", "storage"]
    readers = [rig.tiers.map(block) for _, block in made]
    rig.pager.closing.leave_behind()
    rig.close()
    made.clear()
    block = None
    assert [contents(reader) for reader in readers] == [{0}, {1}, {2}, {3}]
