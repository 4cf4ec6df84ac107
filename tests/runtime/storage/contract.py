"""The contract of all stores, for host and device memory: a class of tests that test modules inherit.

The module provides a fixture `case`: one StoreCase for each kind of store.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.errors import StorageError, StorageFullError
from runtime.storage import ALIGNMENT_BYTES, Slot, Store, cut_slot

from ...thoroughness import by_profile
from ..memory import read_slot, write_slot

MIB = 1 << 20


class CaseMemory(Protocol):
    """Memory that a store copies from and to."""

    address: int

    @property
    def content(self) -> bytes: ...


@dataclass(frozen=True, kw_only=True)
class StoreCase:
    """A kind of store.

    make: makes a store with a limit in bytes. It is closed after the test.
    memory: makes memory of so many bytes, random bytes or zeros.
    option: the option that a user raises when the store is full.
    stripes: number of files that a slot is striped over.
    mappable: a mapping of a slot and the store's reads and writes see each other's changes at once.
    whole: the store also copies the bytes that fill a slot after the block's own bytes. False: it leaves that memory alone.
    """

    make: Callable[[int], Store]
    memory: Callable[[int, bool], CaseMemory]
    option: str
    stripes: int = 1
    mappable: bool = True
    whole: bool = True

    def random(self, size_bytes: int) -> CaseMemory:
        return self.memory(size_bytes, True)

    def stored(self, store: Store, slot: Slot) -> bytes:
        """Return the bytes of the block that a slot holds."""
        memory = self.memory(slot.size_bytes, False)
        read_slot(store, slot, memory.address)
        return memory.content[: slot.content_bytes]


@contextmanager
def opened(make: Callable[[Sequence[Path], int], Store], folders: Sequence[Path], **settings: Any) -> Iterator[StoreCase]:
    """A case whose stores are over these folders. They are closed in the end, and must leave nothing there."""
    stores: list[Store] = []

    def make_one(size_bytes: int) -> Store:
        stores.append(make(folders, size_bytes))
        return stores[-1]

    for folder in folders:
        folder.mkdir()
    yield StoreCase(make=make_one, **settings)
    for store in stores:
        store.close()
    assert all(not list(folder.iterdir()) for folder in folders)


def content(slot: Slot, memory: CaseMemory) -> bytes:
    """Return the bytes of the block that a slot holds after it was written from `memory`."""
    return memory.content[: slot.content_bytes]


def ranges(slots: list[Slot]) -> list[tuple[str, int, int]]:
    extents = chain.from_iterable(slot.extents for slot in slots)
    return sorted((str(e.path), e.offset_bytes, e.offset_bytes + e.length_bytes) for e in extents)


class StoreContract:
    """The tests. Stores are small: 32 MiB unless a test says otherwise."""

    @pytest.fixture
    def store(self, case: StoreCase) -> Store:
        return case.make(32 * MIB)

    def test_blocks_come_back_as_they_left_and_what_fills_a_slot_is_carried_or_left_alone(
        self, case: StoreCase, store: Store
    ) -> None:
        slots = [store.allocate(size, f"block {size}") for size in (1, ALIGNMENT_BYTES, ALIGNMENT_BYTES + 1, MIB + 5000, 5 * MIB)]
        written, read = ([case.random(slot.size_bytes) for slot in slots] for _ in range(2))
        for slot, memory in zip(slots, written, strict=True):
            write_slot(store, slot, memory.address)
        for slot, memory, other in zip(slots, written, read, strict=True):
            behind = (memory if case.whole else other).content[slot.content_bytes :]
            read_slot(store, slot, other.address)
            assert other.content == content(slot, memory) + behind

    def test_slots_are_aligned_and_striped_evenly_over_the_drives(self, case: StoreCase, store: Store) -> None:
        slot = store.allocate(7 * MIB + 5, "weights")
        assert slot.name == "weights" and slot.content_bytes == 7 * MIB + 5
        assert slot.size_bytes == 7 * MIB + ALIGNMENT_BYTES == sum(e.length_bytes for e in slot.extents)
        assert len({e.path for e in slot.extents}) == len(slot.extents) == case.stripes
        assert {e.drive for e in slot.extents} == set(store.drives) and len(set(store.drives)) == len(store.drives)
        lengths = [e.length_bytes for e in slot.extents]
        assert not any(number % ALIGNMENT_BYTES for number in (*lengths, *(e.offset_bytes for e in slot.extents)))
        assert max(lengths) - min(lengths) <= ALIGNMENT_BYTES

    def test_what_is_mapped_over_a_slot_and_what_is_read_agree(self, case: StoreCase, store: Store) -> None:
        if not case.mappable:
            pytest.skip("bytes go round the page cache while a mapping may hold older ones")
        store.allocate(MIB, "something before it")
        slot = store.allocate(2 * MIB, "weights")
        memory = case.random(slot.size_bytes)
        write_slot(store, slot, memory.address)
        extent = slot.extents[0]
        with mmap.mmap(extent.file_descriptor, extent.length_bytes, offset=extent.offset_bytes) as mapped:
            assert mapped[:] == memory.content[: extent.length_bytes]
            mapped[100:103] = b"new"
            assert case.stored(store, slot)[100:103] == b"new"
            write_slot(store, slot, memory.address)
            assert mapped[:] == memory.content[: extent.length_bytes]

    @settings(max_examples=by_profile(ci=6, long=50), deadline=None, suppress_health_check=list(HealthCheck))
    @given(steps=st.lists(st.tuples(st.integers(1, 600_000), st.booleans()), min_size=1, max_size=25))
    def test_slots_never_overlap_and_keep_their_content(self, case: StoreCase, steps: list[tuple[int, bool]]) -> None:
        store = case.make(32 * MIB)
        live: list[tuple[Slot, CaseMemory]] = []
        for size, gives_back in steps:
            if gives_back and live:
                store.release(live.pop(size % len(live))[0])
            slot = store.allocate(size, f"block of {size}")
            memory = case.random(slot.size_bytes)
            write_slot(store, slot, memory.address)
            live.append((slot, memory))
        taken = ranges([slot for slot, _ in live])
        for one, other in zip(taken, taken[1:], strict=False):
            assert one[0] != other[0] or one[2] <= other[1]
        assert store.used_bytes == sum(slot.size_bytes for slot, _ in live) <= store.capacity_bytes
        for slot, memory in live:
            assert case.stored(store, slot) == content(slot, memory)
        store.close()

    def test_ensured_capacity_can_be_used(self, store: Store) -> None:
        store.ensure_capacity(10 * MIB + 1)
        capacity = store.capacity_bytes
        assert 10 * MIB + ALIGNMENT_BYTES <= capacity <= 32 * MIB
        for number in range(10):
            store.allocate(MIB, f"block {number}")
        store.ensure_capacity(MIB)
        assert store.capacity_bytes == capacity

    def test_the_limit_is_kept_to_the_byte(self, case: StoreCase) -> None:
        store = case.make(6 * MIB)
        assert store.limit_bytes == 6 * MIB
        slots = [store.allocate(2 * MIB, f"block {number}") for number in range(3)]
        assert store.used_bytes == store.capacity_bytes == 6 * MIB
        with pytest.raises(StorageFullError, match=rf"6,291,456.*raise {case.option}"):
            store.allocate(1, "one too many")
        with pytest.raises(StorageFullError, match=rf"6,291,456.*raise {case.option}"):
            store.ensure_capacity(6 * MIB + 1)
        store.release(slots[1])
        store.allocate(2 * MIB, "in its place")
        assert store.used_bytes == store.capacity_bytes == 6 * MIB

    def test_a_block_takes_several_holes_where_none_is_large_enough(self, case: StoreCase) -> None:
        store = case.make(8 * MIB)
        slots = [store.allocate(MIB, f"block {number}") for number in range(8)]
        kept = case.random(MIB)
        write_slot(store, slots[3], kept.address)
        for number in (0, 2, 4, 6):
            store.release(slots[number])
        slot = store.allocate(4 * MIB, "in pieces")
        assert len(slot.extents) >= 4
        memory = case.random(4 * MIB)
        write_slot(store, slot, memory.address)
        assert case.stored(store, slot) == memory.content
        assert case.stored(store, slots[3]) == kept.content
        store.release(slot)
        assert store.used_bytes == 4 * MIB
        assert case.stored(store, slots[3]) == kept.content

    def test_a_chunk_touches_nothing_but_itself(self, case: StoreCase, store: Store) -> None:
        slot = store.allocate(3 * MIB, "weights")
        before, after = case.random(slot.size_bytes), case.random(slot.size_bytes)
        write_slot(store, slot, before.address)
        chunk = cut_slot(slot, ALIGNMENT_BYTES)[7]
        begin, end = chunk.slot_offset_bytes, chunk.slot_offset_bytes + chunk.length_bytes
        store.write_chunk(slot, chunk, after.address)
        expected = before.content[:begin] + after.content[begin:end] + before.content[end:]
        assert case.stored(store, slot) == expected
        read = case.memory(slot.size_bytes, False)
        store.read_chunk(slot, chunk, read.address)
        assert read.content == bytes(begin) + after.content[begin:end] + bytes(slot.size_bytes - end)

    def test_many_threads_share_a_store_and_carry_one_slot(self, case: StoreCase, store: Store) -> None:
        def carry(number: int) -> bool:
            slot = store.allocate(200_000 + 4096 * number, f"block {number}")
            memory = case.random(slot.size_bytes)
            write_slot(store, slot, memory.address)
            same = case.stored(store, slot) == content(slot, memory)
            store.release(slot)
            return same

        slot = store.allocate(4 * MIB, "weights")
        memory, read = case.random(slot.size_bytes), case.memory(slot.size_bytes, False)
        chunks = cut_slot(slot, MIB // 4)
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(carry, range(20)))
            list(pool.map(lambda chunk: store.write_chunk(slot, chunk, memory.address), chunks))
            list(pool.map(lambda chunk: store.read_chunk(slot, chunk, read.address), chunks))
        assert read.content == memory.content and store.used_bytes == slot.size_bytes

    def test_a_slot_is_released_once_and_where_it_came_from(self, case: StoreCase, store: Store) -> None:
        slot = store.allocate(MIB, "weights")
        other = case.make(MIB)
        with pytest.raises(StorageError, match="'weights' is not in use"):
            other.release(slot)
        assert (store.used_bytes, other.used_bytes) == (MIB, 0)
        store.release(slot)
        with pytest.raises(StorageError, match="'weights' is not in use"):
            store.release(slot)
        assert store.used_bytes == 0

    def test_a_slot_that_was_released_is_free_when_nobody_keeps_it(self, store: Store) -> None:
        slot = store.allocate(MIB, "weights")
        keepers = [store.keep(slot) for _ in range(2)]
        store.release(slot)
        with pytest.raises(StorageError, match="'weights' is not in use"):
            store.release(slot)
        for let_go in keepers:
            assert store.used_bytes == MIB
            let_go()
        assert store.used_bytes == 0

    def test_after_close_nothing_moves_but_mappings_live_on(self, case: StoreCase, store: Store) -> None:
        slot = store.allocate(MIB, "weights")
        memory = case.random(MIB)
        write_slot(store, slot, memory.address)
        extent = slot.extents[0]
        mapped = mmap.mmap(extent.file_descriptor, extent.length_bytes, offset=extent.offset_bytes)
        store.close()
        store.close()
        if case.mappable:
            assert mapped[:] == memory.content[: extent.length_bytes]
        mapped.close()
        store.release(slot)
        uses: list[Callable[[], object]] = [
            lambda: store.allocate(MIB, "weights"),
            lambda: store.ensure_capacity(MIB),
            lambda: store.limit_bytes,
            lambda: write_slot(store, slot, memory.address),
            lambda: read_slot(store, slot, memory.address),
        ]
        for use in uses:
            with pytest.raises(StorageError, match="tier is closed"):
                use()
        assert store.used_bytes == 0
