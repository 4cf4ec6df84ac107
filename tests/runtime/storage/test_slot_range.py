"""Ranges of slots: where they lie, the order in which all drives have work, and the checksums of the slot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from planner.errors import ChecksumError, StorageError
from runtime.storage.posix import PosixStore
from runtime.storage.slot_range import in_turns, slot_range
from runtime.storage.store import ALIGNMENT_BYTES as PAGE
from runtime.storage.store import Extent, Slot
from runtime.transfer.engine import Engine
from runtime.transfer.torch_memory import TorchBuffer


def slot_of(*pages: int, content_bytes: int | None = None) -> Slot:
    """Make a slot with one extent per number of pages. Each extent is on a separate drive."""
    extents = tuple(
        Extent(file_descriptor=drive, path=Path("f"), offset_bytes=100 * PAGE, length_bytes=count * PAGE, drive=drive)
        for drive, count in enumerate(pages)
    )
    size = sum(pages) * PAGE
    return Slot(name="w", size_bytes=size, content_bytes=size if content_bytes is None else content_bytes, extents=extents)


def test_a_range_over_several_extents() -> None:
    slot = slot_of(2, 3, 4)
    part = slot_range(slot, PAGE, 5 * PAGE)
    found = [(e.drive, e.offset_bytes // PAGE, e.length_bytes // PAGE) for e in part.extents]
    assert found == [(0, 101, 1), (1, 100, 3), (2, 100, 1)]
    assert part.size_bytes == part.content_bytes == 5 * PAGE and part.of is slot and part.name == "w"
    assert slot_range(part, PAGE, PAGE).of is slot
    assert [e.drive for e in slot_range(slot, 2 * PAGE, 3 * PAGE).extents] == [1]


def test_the_last_range_ends_with_the_slot() -> None:
    slot = slot_of(2, 2, content_bytes=3 * PAGE + 5)
    part = slot_range(slot, 3 * PAGE, 8 * PAGE)
    assert part.size_bytes == PAGE and part.content_bytes == 5
    assert slot_range(slot_of(3, content_bytes=PAGE), 2 * PAGE, PAGE).content_bytes == 0


@pytest.mark.parametrize(("begin", "size"), [(0, 0), (5, PAGE), (0, PAGE + 1), (-PAGE, PAGE), (4 * PAGE, PAGE)])
def test_what_is_no_range(begin: int, size: int) -> None:
    with pytest.raises(StorageError, match=f"are no range of the slot of block 'w', which has {4 * PAGE:,} in pages of {PAGE:,}"):
        slot_range(slot_of(4), begin, size)


def test_drives_take_turns() -> None:
    slot = slot_of(3, 2, 3)
    begins = [page * PAGE for page in range(0, 8)]
    assert [begin // PAGE for begin in in_turns(slot, begins)] == [0, 3, 5, 1, 4, 6, 2, 7]
    assert in_turns(slot_of(8), begins) == begins


# -- with an engine


@pytest.fixture
def engine(store: PosixStore) -> Iterator[Engine]:
    engine = Engine(store, threads=2, chunk_bytes=4 * PAGE, checksums=True)
    yield engine
    engine.close()


def memory(pages: int, value: int) -> TorchBuffer:
    buffer = TorchBuffer(torch.zeros((pages + 1) * PAGE, dtype=torch.uint8))
    buffer.write(0, bytes([value]) * (pages * PAGE))
    return buffer


def write(engine: Engine, slot: Slot, value: int) -> None:
    source = memory(slot.size_bytes // PAGE, value)  # must live until it has been written
    engine.write(slot, source.address, lambda _: None).wait()


def read(engine: Engine, slot: Slot) -> bytes:
    target = memory(slot.size_bytes // PAGE, 0)
    engine.read(slot, target.address, lambda _: None).wait()
    return target.read(0, slot.size_bytes)


def test_ranges_are_written_and_read_among_whole_slots(engine: Engine, store: PosixStore) -> None:
    """The chunks differ from those before. Their checksums must neither hide damage nor report damage that is not there."""
    slot = store.allocate(16 * PAGE, "w")
    write(engine, slot, 1)
    part = slot_range(slot, 6 * PAGE, 5 * PAGE)
    assert read(engine, part) == bytes([1]) * (5 * PAGE)
    write(engine, part, 2)
    expected = bytes([1]) * (6 * PAGE) + bytes([2]) * (5 * PAGE) + bytes([1]) * (5 * PAGE)
    assert read(engine, slot) == expected and read(engine, slot_range(slot, 6 * PAGE, 5 * PAGE)) == bytes([2]) * (5 * PAGE)
    write(engine, slot, 3)
    assert read(engine, slot_range(slot, 6 * PAGE, 5 * PAGE)) == bytes([3]) * (5 * PAGE)


@pytest.mark.parametrize("written_as", ["the range", "the whole slot"])
def test_damage_in_a_range_is_found_where_it_was_written_as_one(engine: Engine, store: PosixStore, written_as: str) -> None:
    slot = store.allocate(16 * PAGE, "w")
    write(engine, slot, 1)
    part = slot_range(slot, 4 * PAGE, 4 * PAGE)
    if written_as == "the range":
        write(engine, part, 2)
    extent = part.extents[0]
    with open(extent.path, "r+b") as file:
        file.seek(extent.offset_bytes + 7)
        file.write(b"\xff")
    with pytest.raises(ChecksumError, match="block 'w' in "):
        read(engine, slot_range(slot, 4 * PAGE, 4 * PAGE) if written_as == "the range" else slot)
