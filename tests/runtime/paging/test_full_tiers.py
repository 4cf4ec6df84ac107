"""A lower tier that is smaller than all blocks together: it is enough if it holds those that are away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from planner.errors import StorageFullError
from runtime.cpu import CheckedCpuMover, CpuMemory, CpuMover
from runtime.paging import Block, Pager, State, Tier, Tiers
from runtime.storage import HostStore, PosixStore
from runtime.transfer import Engine

MIB = 1 << 20


class Rig:
    """Blocks of 1 MiB: `device_blocks` fit on the device, `slots` in the host tier; many in files in `folder`."""

    def __init__(self, slots: int, device_blocks: int = 2, folder: Path | None = None) -> None:
        self.memory = CpuMemory()
        self.store = HostStore(slots * MIB)
        self.engine = Engine(self.store, tier="host", threads=1)
        self.tiers = [Tier(name="host", store=self.store, engine=self.engine)]
        if folder is not None:
            files = PosixStore([folder], budget_bytes=None)
            self.tiers.append(Tier(name="storage", store=files, engine=Engine(files, threads=1)))
        self.mover = CheckedCpuMover(CpuMover(self.memory, Tiers(self.tiers), poison=True), self.memory, debug=True)
        self.pager = Pager(mover=self.mover, budget_bytes=device_blocks * MIB)
        self.pager.enter_region()
        self.tensors: list[torch.Tensor] = []

    def make(self, fill: int) -> Block:
        self.pager.acquire([], MIB, "make")
        tensor = torch.full((MIB,), fill, dtype=torch.uint8)
        self.tensors.append(tensor)
        block = self.pager.block_of(tensor, name=f"block {fill}", kind="activation", user_visible=False)
        self.pager.retire([], [])
        return block

    def read(self, block: Block, fill: int) -> None:
        self.pager.acquire([block], 0, "read")
        assert set(self.tensors[fill].tolist()) == {fill}
        self.pager.retire([block], [])

    def write(self, block: Block) -> None:
        self.pager.acquire([block], 0, "write")
        self.pager.retire([block], [block])

    def close(self) -> None:
        self.pager.bring_back_all()
        for tier in self.tiers:
            tier.threads().close()
        self.mover.tiers.close()
        for tier in self.tiers:
            tier.store.close()
        self.memory.stand_back()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(slots=3)
    yield rig
    rig.close()


@pytest.mark.parametrize("writes", [True, False], ids=["void copies", "valid copies"])
def test_copies_of_what_is_on_the_device_make_room(rig: Rig, writes: bool) -> None:
    blocks = [rig.make(fill) for fill in range(4)]  # two away, two on the device, and room for one on its way out
    for _ in range(3):
        for fill, block in enumerate(blocks):
            rig.read(block, fill)
            if writes:
                rig.write(block)
    assert rig.store.used_bytes <= 3 * MIB
    assert sum(block.state is State.OFFLOADED for block in blocks) == 2


def test_void_copies_in_the_wanted_tier_make_room_there(tmp_path: Path) -> None:
    """So the block goes to the tier of the plan."""
    rig = Rig(slots=3, device_blocks=4, folder=tmp_path)
    blocks = [rig.make(fill) for fill in range(4)]
    for fill, block in enumerate(blocks[:3]):
        rig.pager.offload(block, "host")
        rig.read(block, fill)
        rig.write(block)
    assert rig.store.used_bytes == 3 * MIB
    rig.pager.offload(blocks[3], "host")
    rig.read(blocks[3], 3)
    assert blocks[3].tier == "host"
    rig.close()


def test_a_hint_that_finds_no_room_is_passed_over(rig: Rig) -> None:
    blocks = [rig.make(fill) for fill in range(5)]
    (here, _) = [block for block in blocks if block.state is State.ON_DEVICE]
    rig.pager.offload(here, "host")
    assert here.state is State.ON_DEVICE
    with pytest.raises(StorageFullError, match="host_budget"):
        rig.make(5)
