"""The CPU mover over real memory and real files: alone, and under the pager with real threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from planner.errors import ChecksumError, StorageError
from runtime.paging import State

from ...thoroughness import every_other
from ..cpu_machine import MIB, SECONDS, CpuMachine, Drive, slot_of, within
from ..memory import flip_a_bit


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[CpuMachine]:
    rig = CpuMachine(tmp_path)
    yield rig
    rig.close()


def test_the_storage_lives_until_its_copies_have_ended(rig: CpuMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a copy that begins when another one ends: a prefetch that was waiting for its block."""
    tensor, block = rig.make(4 * MIB, 1)
    began, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(Drive, "reads", lambda store, chunk: (began.set(), go_on.wait(SECONDS))[1])
    rig.pager.offload(block)
    rig.pager.prefetch(block)
    assert began.wait(SECONDS)
    while rig.engine.write_link.busy_seconds == 0 or rig.pager.account.offloading_bytes:
        pass
    writer = rig.tiers._transfers[block]
    del tensor
    threading.Event().wait(0.05)  # time for the I/O thread of the write to return
    alive = block.storage() is not None
    go_on.set()
    writer.wait(SECONDS)
    assert alive, "otherwise pages are moved over memory that others may have by now"


def test_a_copy_that_can_not_begin_keeps_nothing(rig: CpuMachine) -> None:
    tensor, block = rig.make(2 * MIB, 1)
    rig.leave(block)
    rig.engine.close()
    with pytest.raises(StorageError, match="closed"):
        rig.pager.acquire([block], 0, "read")
    del tensor
    gc.collect()
    assert block.dead and not rig.plain._arrived


# -- checksums


@pytest.fixture
def checked(tmp_path: Path) -> Iterator[CpuMachine]:
    rig = CpuMachine(tmp_path, checksums=True)
    yield rig
    rig.close()


@pytest.mark.parametrize(
    ("checks", "moment"),
    every_other(
        ("checksums", "before user code writes"),
        ("checksums", "after user code has written"),
        ("debug", "after user code has written"),
        ("debug", "before user code writes"),
    ),
)
@pytest.mark.parametrize("place", [MIB, MIB + 99, 3 * MIB], ids=["written byte", "written page", "other page"])
def test_damage_is_told_from_what_user_code_writes(checks: str, moment: str, place: int, tmp_path: Path) -> None:
    rig = CpuMachine(tmp_path, **{checks: True})  # type: ignore[arg-type]
    tensor, block = rig.make(4 * MIB, 1)
    other, good = rig.make(2 * MIB, 2)
    for each in (block, good):
        each.user_visible = True
        rig.pager.offload(each)
    rig.pager.leave_region()
    if moment == "before user code writes":
        flip_a_bit(slot_of(block).extents[0], place)
    tensor[MIB], other[MIB] = 9, 8
    if moment == "after user code has written":
        flip_a_bit(slot_of(block).extents[0], place)
    with pytest.raises(ChecksumError, match="block 'w' in "):
        rig.pager.enter_region()
        rig.use(block)
    with pytest.raises(RuntimeError, match="w was damaged on its way"):
        tensor.sum()
    with pytest.raises(ChecksumError):
        within(SECONDS, rig.pager.closing.bring_back)
    assert good.state is State.ON_DEVICE and other.unique().tolist() == [2, 8], "all others are back"
    flip_a_bit(slot_of(block).extents[0], place)
    if place < 3 * MIB:
        with pytest.raises(ChecksumError):  # user code has changed the damaged page
            within(SECONDS, rig.pager.closing.bring_back)
    elif checks == "checksums":
        within(SECONDS, rig.pager.closing.bring_back)
        assert tensor.unique().tolist() == [1, 9] and tensor[MIB] == 9, "the drive gives the right bytes again"
    rig.close()


def test_what_user_code_has_read_is_compared_when_it_ends(checked: CpuMachine) -> None:
    tensor, block = checked.make(4 * MIB, 1)
    block.user_visible = True
    checked.pager.offload(block)
    checked.pager.leave_region()
    flip_a_bit(slot_of(block).extents[0], 3 * MIB)
    checked.pager.enter_region()  # it has read nothing
    checked.pager.leave_region()
    assert tensor[3 * MIB] == 0
    with pytest.raises(ChecksumError):
        checked.pager.enter_region()


def test_ranges_are_compared_however_the_slot_was_written(checked: CpuMachine) -> None:
    """Written as a whole, or in other ranges; the ranges of an update by slices, say."""
    _tensor, block = checked.make(4 * MIB, 1)
    checked.pager.lending.lend([block])
    buffer = torch.full((2 * MIB,), 2, dtype=torch.uint8)
    checked.pager.lending.copy_range(block, MIB, buffer, to_slot=True)()
    for place in (0, MIB + 4096, 4 * MIB - 1):
        flip_a_bit(slot_of(block).extents[0], place)
        for begin in (0, 2 * MIB):
            copy = checked.pager.lending.copy_range(block, begin, buffer, to_slot=False)
            if begin <= place < begin + 2 * MIB:
                with pytest.raises(ChecksumError):
                    copy()
            else:
                copy()
        flip_a_bit(slot_of(block).extents[0], place)
    checked.pager.lending.give_back([block])
    within(SECONDS, lambda: checked.pager.acquire([block], 0, "read"))


# -- several movers in one process


def test_a_storage_has_one_mover(rig: CpuMachine, tmp_path: Path) -> None:
    """Two movers would each map a slot over the pages, and a write to one slot would be missing in the other."""
    (tmp_path / "other").mkdir()
    other = CpuMachine(tmp_path / "other", ownership=rig.ownership)
    tensor, block = rig.make(4 * MIB, 1)
    rig.pager.offload(block)
    block.user_visible = True
    rig.pager.leave_region()
    theirs = other.pager.block_of(tensor, name="w", kind="parameter", user_visible=True)
    assert theirs.span is None
    tensor.fill_(5)
    other.use(theirs, writes=True)
    other.pager.offload(theirs)
    other.pager.leave_region()
    rig.pager.enter_region()
    rig.use(block)
    assert tensor.unique().tolist() == [5]
    other.close()


# -- what user code may do to a storage that is away


@pytest.mark.parametrize("end", ["next region", "bring back all"])
@pytest.mark.parametrize("change", ["shared", "resized", "resized and back"])
def test_a_storage_gets_other_memory_while_it_is_away(rig: CpuMachine, change: str, end: str) -> None:
    """By then its old address belongs to another block, even if the storage has it again."""
    tensor, block = rig.make(4 * MIB, 3)
    block.user_visible = True
    rig.pager.offload(block)
    rig.pager.leave_region()
    assert block.state is State.OFFLOADED
    storage = tensor.untyped_storage()
    if change == "shared":
        tensor.share_memory_()
    else:
        storage.resize_(0)
        if change == "resized and back":
            storage.resize_(4 * MIB)
            tensor.fill_(4)
    others = [torch.full((4 * MIB,), 5, dtype=torch.uint8) for _ in range(3)]
    rig.pager.enter_region() if end == "next region" else rig.pager.closing.bring_back()
    assert all(other.unique().tolist() == [5] for other in others)
    if change != "resized":
        assert tensor.unique().tolist() == [3 if change == "shared" else 4]
