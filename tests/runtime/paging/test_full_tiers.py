"""A lower tier that is smaller than all blocks together: it is enough if it holds those that are away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.errors import StorageFullError
from runtime.paging import State

from ..cpu_machine import MIB, CpuMachine


@pytest.fixture
def rig() -> Iterator[CpuMachine]:
    """Two blocks of 1 MiB fit on the device, three in the host tier."""
    rig = CpuMachine(host_bytes=3 * MIB, budget_bytes=2 * MIB, debug=True)
    yield rig
    rig.pager.bring_back_all()
    rig.close()


@pytest.mark.parametrize("writes", [True, False], ids=["void copies", "valid copies"])
def test_copies_of_what_is_on_the_device_make_room(rig: CpuMachine, writes: bool) -> None:
    made = [rig.make(MIB, fill) for fill in range(4)]  # two away, two on the device, and room for one on its way out
    for _ in range(3):
        for fill, (tensor, block) in enumerate(made):
            rig.use(block, writes=writes)
            assert set(tensor.tolist()) == {fill}
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
