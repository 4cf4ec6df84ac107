"""What is known of slots: sums of pages that tell damage, hashes of chunks that need no write, ranges of both."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import ChecksumError, StorageError, StorageIOError
from runtime.storage import ALIGNMENT_BYTES as PAGE
from runtime.storage import Checksums, Chunk, Extent, PageSums, PosixStore, Slot, UnchangedChunks, cut_slot, in_turns, slot_range

from ..memory import Memory, flip_a_bit

SUMMED = 4096
SIZE = 1 << 20
CHUNK = 256 << 10


# -- sums of pages


@given(data=st.data(), length=st.integers(1, 5 * SUMMED))
def test_a_changed_bit_is_found(data: st.DataObject, length: int) -> None:
    memory = ctypes.create_string_buffer(os.urandom(length), length)
    sums = PageSums(length)
    sums.note(0, ctypes.addressof(memory), length)
    assert sums.compare(0, ctypes.addressof(memory), length) is None
    place = data.draw(st.integers(0, length - 1))
    memory[place] = memory.raw[place] ^ 1 << data.draw(st.integers(0, 7))
    found = sums.compare(0, ctypes.addressof(memory), length)
    assert found is not None and found.expected != found.found
    assert found.offset_bytes == place // SUMMED * SUMMED


def test_pages_without_a_sum_are_not_compared_and_order_counts() -> None:
    memory = ctypes.create_string_buffer(bytes(2 * SUMMED), 2 * SUMMED)
    address = ctypes.addressof(memory)
    sums = PageSums(3 * SUMMED)
    assert sums.compare(0, address, 2 * SUMMED) is None
    sums.note(SUMMED, address, SUMMED)
    assert sums.compare(0, address, 2 * SUMMED) is None
    for place, word in ((0, 1), (8, 2)):
        memory[place] = word
    sums.note(0, address, SUMMED)
    memory[0], memory[8] = 2, 1
    assert sums.compare(0, address, 2 * SUMMED) is not None


# -- ranges of slots


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
    assert part.size_bytes == part.content_bytes == 5 * PAGE and (part.of, part.begin_bytes, part.name) == (slot, PAGE, "w")
    inner = slot_range(part, 2 * PAGE, PAGE)
    assert (inner.of, inner.begin_bytes) == (slot, 3 * PAGE)
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


# -- what a store holds

Copy = Callable[[Slot, Chunk, int], None]


@pytest.fixture
def slot(store: PosixStore, memory: Memory) -> Slot:
    """A slot that holds what is in the memory."""
    slot = store.allocate(SIZE, "layers.3.weight")
    each(store.write_chunk, slot, memory)
    return slot


@pytest.fixture
def memory() -> Memory:
    return Memory(SIZE, random=True)


def each(copy: Copy, slot: Slot, memory: Memory, chunk_bytes: int = CHUNK) -> list[Chunk]:
    chunks = list(cut_slot(slot, chunk_bytes))
    for chunk in chunks:
        copy(slot, chunk, memory.address)
    return chunks


@pytest.mark.parametrize("read_as", ["the whole slot", "a range", "small pieces"])
@pytest.mark.parametrize("written_as", ["the whole slot", "a range"])
def test_damage_is_found_however_it_was_written_and_read(
    store: PosixStore, slot: Slot, memory: Memory, written_as: str, read_as: str
) -> None:
    checksums = Checksums(store.write_chunk, store.read_chunk)
    each(checksums.write_chunk, slot, memory)
    part = slot_range(slot, 100 * PAGE, 60 * PAGE)  # in both files
    if written_as == "a range":
        memory.fill()
        each(checksums.write_chunk, part, memory)
    for copy, chunk_bytes in ((slot, CHUNK), (part, 7 * PAGE)):
        each(checksums.read_chunk, copy, memory, chunk_bytes)  # nothing is damaged yet
    damaged = cut_slot(part, CHUNK)[-1]
    flip_a_bit(damaged.extent, damaged.file_offset_bytes - damaged.extent.offset_bytes + 3 * PAGE + 17)
    again, chunk_bytes = {"the whole slot": (slot, CHUNK), "a range": (part, CHUNK), "small pieces": (part, PAGE)}[read_as]
    with pytest.raises(ChecksumError) as raised:
        each(checksums.read_chunk, again, memory, chunk_bytes)
    expected = (str(damaged.extent.path), damaged.file_offset_bytes + 3 * PAGE, slot.name)
    assert (raised.value.path, raised.value.offset_bytes, raised.value.block) == expected
    checksums.forget(slot)
    each(checksums.read_chunk, again, memory, chunk_bytes)


def held(unchanged: UnchangedChunks, slot: Slot, memory: Memory) -> list[bool]:
    return [unchanged.holds(slot, chunk, memory.address) for chunk in cut_slot(slot, CHUNK)]


@pytest.fixture
def unchanged(store: PosixStore, slot: Slot) -> UnchangedChunks:
    unchanged = UnchangedChunks(store.read_chunk)
    unchanged.watch(slot)
    return unchanged


@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize("place", [0, CHUNK - 1])
def test_one_changed_bit_is_seen(unchanged: UnchangedChunks, slot: Slot, memory: Memory, number: int, place: int) -> None:
    place += each(unchanged.read_chunk, slot, memory)[number].slot_offset_bytes
    expected = [each != number for each in range(4)]
    for _ in range(2):
        changed = ctypes.c_ubyte.from_address(memory.address + place)
        changed.value ^= 1
        # The second time it is as it was, but by then the file may hold what was there in between.
        assert held(unchanged, slot, memory) == expected


@pytest.mark.parametrize(
    "what", ["it was not watched", "it was written", "a range was read", "a range was written", "it is another block's"]
)
def test_a_slot_is_not_compared_before_it_is_read_again(
    unchanged: UnchangedChunks, store: PosixStore, slot: Slot, memory: Memory, what: str
) -> None:
    if what == "it was not watched":
        unchanged = UnchangedChunks(store.read_chunk)
    each(unchanged.read_chunk, slot, memory)
    part = slot_range(slot, PAGE, PAGE)
    (chunk,) = cut_slot(part, CHUNK)
    if what == "it was written":
        unchanged.forget(slot)
    elif what == "a range was read":
        unchanged.read_chunk(part, chunk, memory.address)
    elif what == "a range was written":
        assert not unchanged.holds(part, chunk, memory.address)
    elif what == "it is another block's":
        store.release(slot)
        again = store.allocate(SIZE, "another block")
        assert again.extents == slot.extents
        slot = again
    assert not any(held(unchanged, slot, memory))
    unchanged.watch(slot)
    assert not any(held(unchanged, slot, memory))
    each(unchanged.read_chunk, slot, memory)
    assert all(held(unchanged, slot, memory))


def test_a_read_that_fails_makes_its_chunk_unknown(store: PosixStore, slot: Slot, memory: Memory) -> None:
    fails = False

    def read(slot: Slot, chunk: Chunk, address: int) -> None:
        if fails:
            raise StorageIOError(path="p", block=slot.name, errno=5, action="read")
        store.read_chunk(slot, chunk, address)

    unchanged = UnchangedChunks(read)
    unchanged.watch(slot)
    first, *_ = each(unchanged.read_chunk, slot, memory)
    fails = True
    with pytest.raises(StorageIOError):
        unchanged.read_chunk(slot, first, memory.address)
    assert held(unchanged, slot, memory) == [False, True, True, True]
