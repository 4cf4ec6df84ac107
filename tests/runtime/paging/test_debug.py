"""The debug mode in main memory: poison is where it should be, hashes find what was lost, and raise no false alarms."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from planner.errors import ChecksumError, UnsupportedError
from runtime.device import Span
from runtime.paging import POISON, Block, Pager, State
from runtime.storage import Chunk, Extent, Slot
from runtime.system import storage_swap

from ..cpu.test_mover import MIB, SECONDS, Rig, within


def use(pager: Pager, block: Block) -> None:
    """Run a stage that reads a block."""
    within(SECONDS, lambda: pager.acquire([block], 0, "read"))
    pager.retire([block], [])


def slot_of(block: Block) -> Slot:
    assert block.slot is not None
    return block.slot


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, debug=True)
    rig.memory.trim(0)
    yield rig
    rig.close()


def leave(rig: Rig, block: Block) -> None:
    rig.pager.offload(block)
    until(rig, block, State.OFFLOADED)


def until(rig: Rig, block: Block, state: State) -> None:
    """Wait until a block is in a state and its memory has followed: only then the lock is free."""
    deadline = time.monotonic() + SECONDS
    while True:
        with rig.pager.condition:
            if block.state is state:
                return
        assert time.monotonic() < deadline
        time.sleep(0.001)


def flip_a_bit(extent: Extent, offset_bytes: int) -> None:
    with open(extent.path, "r+b") as file:
        file.seek(extent.offset_bytes + offset_bytes)
        (before,) = file.read(1)
        file.seek(extent.offset_bytes + offset_bytes)
        file.write(bytes([before ^ 1]))


def test_pages_that_a_block_gives_up_are_poisoned(rig: Rig) -> None:
    tensor, block = rig.make(4 * MIB, 7)
    leave(rig, block)
    assert rig.memory.kept_bytes == 4 * MIB
    fresh = torch.empty(4 * MIB, dtype=torch.uint8)
    assert rig.memory.kept_bytes == 0, "these are the pages"
    assert fresh.unique().tolist() == [POISON]
    assert tensor.unique().tolist() == [7], "what stands in for the block is none of them"


def test_pages_that_user_code_may_be_reading_are_not(rig: Rig) -> None:
    """They go back to the system when the slot takes their place."""
    tensor, block = rig.make(4 * MIB, 7)
    block.user_visible = True
    leave(rig, block)
    assert rig.memory.kept_bytes == 0
    assert tensor.unique().tolist() == [7]


def test_what_does_not_arrive_is_poison_and_found_again_and_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, block = rig.make(4 * MIB, 7)
    leave(rig, block)
    rig.memory.trim(0)  # pages that were given up are poisoned already, new ones are not
    read_chunk = rig.store.read_chunk

    def read_the_first(slot: Slot, piece: Chunk, address: int) -> None:
        if piece.slot_offset_bytes == 0:
            read_chunk(slot, piece, address)

    monkeypatch.setattr(rig.engine.read_link, "_move", read_the_first)
    for _ in range(2):
        with pytest.raises(ChecksumError, match="block 'w' in "):
            use(rig.pager, block)
    with pytest.raises(RuntimeError, match="w was damaged on its way"):
        tensor.sum()
    storage_swap.reopen(tensor.untyped_storage())
    assert tensor[: 2 * MIB].unique().tolist() == [7]
    assert tensor[2 * MIB :].unique().tolist() == [POISON]


def test_the_error_says_where_the_damage_is(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    rig = Rig(*folders, debug=True)
    _tensor, block = rig.make(4 * MIB, 7, "layers.3.out")
    leave(rig, block)
    _first, second = slot_of(block).extents
    flip_a_bit(second, 5)
    with pytest.raises(ChecksumError) as raised:
        use(rig.pager, block)
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


def test_damage_after_the_drive_has_done_its_work(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checksum would not find it: it follows a piece only until it is in memory."""
    tensor, block = rig.make(4 * MIB, 7)
    leave(rig, block)
    install = rig.memory.install_pages

    def install_wrongly(source: Span, target: Span) -> None:
        install(source, target)
        tensor[3 * MIB] = 8

    monkeypatch.setattr(rig.memory, "install_pages", install_wrongly)
    with pytest.raises(ChecksumError):
        use(rig.pager, block)


def test_a_copy_that_serves_twice_is_compared_twice(rig: Rig) -> None:
    _tensor, block = rig.make(4 * MIB, 7)
    leave(rig, block)
    use(rig.pager, block)
    written = rig.engine.write_link.moved_bytes
    leave(rig, block)
    assert rig.engine.write_link.moved_bytes == written, "the copy was still good"
    flip_a_bit(slot_of(block).extents[0], 0)
    with pytest.raises(ChecksumError):
        use(rig.pager, block)


def test_a_copy_out_that_a_write_overtakes_counts_for_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, block = rig.make(4 * MIB, 7)
    go_on = threading.Event()
    write_chunk = rig.store.write_chunk

    def write_later(slot: Slot, piece: Chunk, address: int) -> None:
        assert go_on.wait(SECONDS)
        write_chunk(slot, piece, address)

    monkeypatch.setattr(rig.engine.write_link, "_move", write_later)
    rig.pager.offload(block)
    assert block.state is State.OFFLOADING
    rig.pager.acquire([block], 0, "write")
    tensor.fill_(8)
    rig.pager.retire([block], [block])
    go_on.set()
    until(rig, block, State.ON_DEVICE)
    assert not block.copy_is_valid
    leave(rig, block)
    use(rig.pager, block)
    assert tensor.unique().tolist() == [8]


@pytest.mark.parametrize("seen", ["before it left", "while it was away"])
@pytest.mark.parametrize("back", ["by the next region", "all at once"])
def test_what_user_code_writes_while_a_block_is_away_is_no_damage(rig: Rig, back: str, seen: str) -> None:
    tensor, block = rig.make(4 * MIB, 1)
    block.user_visible = seen == "before it left"
    leave(rig, block)
    block.user_visible = True
    rig.pager.leave_region()
    tensor[MIB] = 9
    if back == "by the next region":
        rig.pager.enter_region()
        use(rig.pager, block)
    else:
        rig.pager.bring_back_all()
    assert block.state is State.ON_DEVICE
    assert tensor[MIB] == 9 and tensor.unique().tolist() == [1, 9]


def test_what_is_made_anew_is_compared_with_what_was_dropped(rig: Rig) -> None:
    tensor, block = rig.make(4 * MIB, 7, "layers.3.out")
    block.source = object()
    rig.pager.drop(block)
    other = torch.full((4 * MIB,), 7, dtype=torch.uint8)
    other[5] = 8
    with pytest.raises(UnsupportedError, match="^layers.3.out was recomputed with other bytes: its checksum was"):
        rig.pager.renew({block: other.untyped_storage()})
    assert block.state is State.DROPPED and other[5] == 8, "nothing has changed"
    other[5] = 7
    rig.pager.renew({block: other.untyped_storage()})
    use(rig.pager, block)
    assert tensor.unique().tolist() == [7]
