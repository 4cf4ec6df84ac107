"""The contract of a store, over every kind of it."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from storage_memory import Memory

from planner.errors import StorageError, StorageFullError
from runtime.storage.posix import PosixStore
from runtime.storage.store import ALIGNMENT_BYTES, Slot, cut

MakeStore = Callable[..., PosixStore]
MIB = 1 << 20


def ranges(slots: list[Slot]) -> list[tuple[str, int, int]]:
    extents = chain.from_iterable(slot.extents for slot in slots)
    return sorted((str(e.path), e.offset_bytes, e.offset_bytes + e.length_bytes) for e in extents)


def test_a_block_comes_back_as_it_left(store: PosixStore) -> None:
    sizes = [1, ALIGNMENT_BYTES, ALIGNMENT_BYTES + 1, 3 * MIB + 17, 5 * MIB]
    slots = [store.allocate(size, f"block {size}") for size in sizes]
    written = [Memory(slot.size_bytes, random=True) for slot in slots]
    for slot, memory in zip(slots, written, strict=True):
        store.write(slot, memory.address)
    for slot, memory in zip(slots, written, strict=True):
        read = Memory(slot.size_bytes)
        store.read(slot, read.address)
        assert read.content == memory.content


def test_slots_are_aligned_and_striped_evenly(store: PosixStore) -> None:
    slot = store.allocate(7 * MIB + 5, "weights")
    assert slot.name == "weights"
    assert slot.size_bytes == 7 * MIB + ALIGNMENT_BYTES
    assert sum(e.length_bytes for e in slot.extents) == slot.size_bytes
    assert len({e.path for e in slot.extents}) == len(slot.extents) == len(store.directories)
    for extent in slot.extents:
        assert extent.offset_bytes % ALIGNMENT_BYTES == extent.length_bytes % ALIGNMENT_BYTES == 0
    lengths = [e.length_bytes for e in slot.extents]
    assert max(lengths) - min(lengths) <= ALIGNMENT_BYTES


def test_files_are_private_and_under_the_directories(store: PosixStore) -> None:
    slot = store.allocate(MIB, "weights")
    for extent, directory in zip(slot.extents, store.directories, strict=True):
        assert extent.path.parent == directory
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
        assert stat.S_IMODE(os.stat(extent.path).st_mode) == 0o600


def test_what_is_mapped_over_a_slot_and_what_is_read_agree(store: PosixStore) -> None:
    slot = store.allocate(2 * MIB, "weights")
    memory = Memory(slot.size_bytes, random=True)
    store.write(slot, memory.address)
    extent = slot.extents[0]
    with mmap.mmap(extent.file_descriptor, extent.length_bytes, offset=extent.offset_bytes) as mapped:
        assert mapped[:] == memory.content[: extent.length_bytes]
        mapped[100:103] = b"new"
        read = Memory(slot.size_bytes)
        store.read(slot, read.address)
        assert read.content[100:103] == b"new"
        store.write(slot, memory.address)
        assert mapped[:] == memory.content[: extent.length_bytes]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.integers(1, 600_000), st.booleans()), min_size=1, max_size=25))
def test_slots_never_overlap_and_keep_their_content(
    make_store: MakeStore, steps: list[tuple[int, bool]]
) -> None:
    store = make_store()
    live: list[tuple[Slot, Memory]] = []
    for size, gives_back in steps:
        if gives_back and live:
            store.release(live.pop(size % len(live))[0])
        slot = store.allocate(size, f"block of {size}")
        memory = Memory(slot.size_bytes, random=True)
        store.write(slot, memory.address)
        live.append((slot, memory))
    taken = ranges([slot for slot, _ in live])
    for one, other in zip(taken, taken[1:], strict=False):
        assert one[0] != other[0] or one[2] <= other[1]
    assert store.used_bytes == sum(slot.size_bytes for slot, _ in live) <= store.capacity_bytes
    for slot, memory in live:
        read = Memory(slot.size_bytes)
        store.read(slot, read.address)
        assert read.content == memory.content
    store.close()


def test_room_that_is_released_is_used_again(store: PosixStore) -> None:
    first = store.allocate(3 * MIB, "first")
    capacity = store.capacity_bytes
    for _ in range(100):
        store.release(first)
        first = store.allocate(3 * MIB, "first")
    assert store.capacity_bytes == capacity
    assert store.used_bytes == 3 * MIB


def test_ensured_capacity_is_on_the_drive_and_enough(store: PosixStore) -> None:
    store.ensure_capacity(10 * MIB + 1)
    assert store.capacity_bytes == 10 * MIB + ALIGNMENT_BYTES
    blocks = sum(os.stat(directory / "blocks.spill").st_blocks for directory in store.directories)
    assert blocks * 512 >= store.capacity_bytes
    for number in range(10):
        store.allocate(MIB, f"block {number}")
    assert store.capacity_bytes == 10 * MIB + ALIGNMENT_BYTES
    store.ensure_capacity(MIB)
    assert store.capacity_bytes == 10 * MIB + ALIGNMENT_BYTES


def test_the_storage_budget_is_kept_to_the_byte(make_store: MakeStore) -> None:
    store = make_store(budget_bytes=6 * MIB)
    assert store.limit_bytes == 6 * MIB
    slots = [store.allocate(2 * MIB, f"block {number}") for number in range(3)]
    assert store.capacity_bytes <= 6 * MIB
    with pytest.raises(StorageFullError, match=r"storage_budget allows 6,291,456; raise storage_budget"):
        store.allocate(1, "one too many")
    with pytest.raises(StorageFullError, match="storage_budget"):
        store.ensure_capacity(6 * MIB + 1)
    store.release(slots[1])
    store.allocate(2 * MIB, "in its place")
    assert store.capacity_bytes <= 6 * MIB


def test_a_block_takes_several_holes_where_none_is_large_enough(make_store: MakeStore) -> None:
    store = make_store(budget_bytes=8 * MIB)
    slots = [store.allocate(MIB, f"block {number}") for number in range(8)]
    kept = Memory(MIB, random=True)
    store.write(slots[3], kept.address)
    for number in (0, 2, 4, 6):
        store.release(slots[number])
    slot = store.allocate(4 * MIB, "in pieces")
    memory = Memory(4 * MIB, random=True)
    store.write(slot, memory.address)
    read = Memory(4 * MIB)
    store.read(slot, read.address)
    assert read.content == memory.content
    store.read(slots[3], read.address)
    assert read.content[:MIB] == kept.content
    assert store.capacity_bytes <= 8 * MIB


def test_pieces_cover_a_slot_once_and_take_the_files_in_turns(store: PosixStore) -> None:
    slot = store.allocate(5 * MIB + 3, "weights")
    pieces = cut(slot, MIB)
    places = sorted((p.slot_offset_bytes, p.slot_offset_bytes + p.length_bytes) for p in pieces)
    assert places[0][0] == 0 and places[-1][1] == slot.size_bytes
    assert all(one[1] == other[0] for one, other in zip(places, places[1:], strict=False))
    assert max(p.length_bytes for p in pieces) <= MIB
    count = len(store.directories)
    assert {p.extent.path for p in pieces[:count]} == {e.path for e in slot.extents}
    memory, read = Memory(slot.size_bytes, random=True), Memory(slot.size_bytes)
    for piece in pieces:
        store.write_piece(slot, piece, memory.address)
    for piece in reversed(pieces):
        store.read_piece(slot, piece, read.address)
    assert read.content == memory.content


def test_many_threads_share_a_store(store: PosixStore) -> None:
    def carry(number: int) -> bool:
        slot = store.allocate(200_000 + 4096 * number, f"block {number}")
        memory, read = Memory(slot.size_bytes, random=True), Memory(slot.size_bytes)
        store.write(slot, memory.address)
        store.read(slot, read.address)
        store.release(slot)
        return read.content == memory.content

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(carry, range(40)))
    assert store.used_bytes == 0


def test_a_slot_is_released_once(store: PosixStore) -> None:
    slot = store.allocate(MIB, "weights")
    store.release(slot)
    with pytest.raises(StorageError, match="'weights' is not in use"):
        store.release(slot)


def test_after_close_the_files_are_gone_but_mappings_live_on(store: PosixStore) -> None:
    slot = store.allocate(MIB, "weights")
    memory = Memory(MIB, random=True)
    store.write(slot, memory.address)
    extent = slot.extents[0]
    mapped = mmap.mmap(extent.file_descriptor, extent.length_bytes, offset=extent.offset_bytes)
    store.close()
    store.close()
    assert not any(directory.exists() for directory in store.directories)
    assert mapped[:] == memory.content[: extent.length_bytes]
    mapped.close()
    store.release(slot)
    with pytest.raises(StorageError, match="is closed"):
        store.allocate(MIB, "weights")


def test_direct_tells_which_way_is_taken(store: PosixStore) -> None:
    descriptors = [extent.file_descriptor for extent in store.allocate(MIB, "weights").extents]
    flags = [bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT) for descriptor in descriptors]
    assert flags == [store.direct] * len(flags)
