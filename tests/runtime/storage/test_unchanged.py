"""Which chunks need no write: only those whose slot holds the very same bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from planner.errors import ChecksumError, StorageIOError
from runtime.storage import UnchangedChunks, slot_range
from runtime.storage.posix import PosixStore
from runtime.storage.store import ALIGNMENT_BYTES, Chunk, Slot, cut_slot
from runtime.transfer.torch_memory import TorchBuffer, TorchMemory

SIZE = 1 << 20
CHUNK = 256 << 10


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PosixStore]:
    store = PosixStore([tmp_path], budget_bytes=None)
    yield store
    store.close()


@pytest.fixture
def buffer() -> Iterator[TorchBuffer]:
    with TorchMemory(torch.device("cpu")).allocate(SIZE) as buffer:
        buffer.write(0, os.urandom(SIZE))
        yield buffer


@pytest.fixture
def slot(store: PosixStore, buffer: TorchBuffer) -> Slot:
    """A slot that holds what is in the buffer."""
    slot = store.allocate(SIZE, "layers.3.weight")
    for chunk in cut_slot(slot, CHUNK):
        store.write_chunk(slot, chunk, buffer.address)
    return slot


def read(unchanged: UnchangedChunks, slot: Slot, buffer: TorchBuffer) -> list[Chunk]:
    chunks = list(cut_slot(slot, CHUNK))
    for chunk in chunks:
        unchanged.read_chunk(slot, chunk, buffer.address)
    return chunks


def held(unchanged: UnchangedChunks, slot: Slot, buffer: TorchBuffer) -> list[bool]:
    return [unchanged.holds(slot, chunk, buffer.address) for chunk in cut_slot(slot, CHUNK)]


def test_only_watched_slots_are_hashed(store: PosixStore, slot: Slot, buffer: TorchBuffer) -> None:
    unchanged = UnchangedChunks(store)
    read(unchanged, slot, buffer)
    assert held(unchanged, slot, buffer) == [False] * 4
    unchanged.watch(slot)
    assert held(unchanged, slot, buffer) == [False] * 4  # not read since
    read(unchanged, slot, buffer)
    for _ in range(2):
        assert held(unchanged, slot, buffer) == [True] * 4


@pytest.mark.parametrize("offset_bytes", [0, CHUNK - 1, CHUNK, SIZE - 1])
def test_one_changed_bit_is_seen(store: PosixStore, slot: Slot, buffer: TorchBuffer, offset_bytes: int) -> None:
    unchanged = UnchangedChunks(store)
    unchanged.watch(slot)
    read(unchanged, slot, buffer)
    buffer.write(offset_bytes, bytes([buffer.read(offset_bytes, 1)[0] ^ 1]))
    assert held(unchanged, slot, buffer) == [number != offset_bytes // CHUNK for number in range(4)]
    buffer.write(offset_bytes, bytes([buffer.read(offset_bytes, 1)[0] ^ 1]))
    expected = [number != offset_bytes // CHUNK for number in range(4)]
    assert held(unchanged, slot, buffer) == expected  # by now the file may hold what was there in between


def test_what_was_written_is_not_compared_before_it_is_read_again(store: PosixStore, slot: Slot, buffer: TorchBuffer) -> None:
    unchanged = UnchangedChunks(store)
    unchanged.watch(slot)
    read(unchanged, slot, buffer)
    unchanged.forget(slot)
    assert not any(held(unchanged, slot, buffer))
    read(unchanged, slot, buffer)
    assert all(held(unchanged, slot, buffer))


@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_range_makes_the_whole_slot_unknown(store: PosixStore, slot: Slot, buffer: TorchBuffer, direction: str) -> None:
    unchanged = UnchangedChunks(store)
    unchanged.watch(slot)
    read(unchanged, slot, buffer)
    part = slot_range(slot, ALIGNMENT_BYTES, ALIGNMENT_BYTES)
    (chunk,) = cut_slot(part, CHUNK)
    if direction == "write":
        assert not unchanged.holds(part, chunk, buffer.address)
    else:
        unchanged.read_chunk(part, chunk, buffer.address)
    assert not any(held(unchanged, slot, buffer))


def test_a_read_that_fails_makes_its_chunk_unknown(store: PosixStore, slot: Slot, buffer: TorchBuffer) -> None:
    class Failing:
        fails = False

        def write_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
            raise NotImplementedError

        def read_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
            if self.fails:
                raise StorageIOError(path="p", block=slot.name, errno=5, action="read")
            store.read_chunk(slot, chunk, address)

    source = Failing()
    unchanged = UnchangedChunks(source)
    unchanged.watch(slot)
    first, *_ = read(unchanged, slot, buffer)
    source.fails = True
    with pytest.raises(StorageIOError):
        unchanged.read_chunk(slot, first, buffer.address)
    assert held(unchanged, slot, buffer) == [False, True, True, True]


def test_a_released_slot_is_forgotten(store: PosixStore, slot: Slot, buffer: TorchBuffer) -> None:
    unchanged = UnchangedChunks(store)
    unchanged.watch(slot)
    read(unchanged, slot, buffer)
    store.release(slot)
    again = store.allocate(SIZE, "another block")  # at the same place
    assert not any(held(unchanged, again, buffer))


def test_verify_compares_the_bytes(store: PosixStore, slot: Slot, buffer: TorchBuffer) -> None:
    unchanged = UnchangedChunks(store, verify=True)
    unchanged.watch(slot)
    chunk = read(unchanged, slot, buffer)[2]
    assert all(held(unchanged, slot, buffer))
    with open(chunk.extent.path, "r+b") as file:
        file.seek(chunk.file_offset_bytes + 17)
        file.write(bytes(8))
        os.fsync(file.fileno())
    with pytest.raises(ChecksumError, match=r"layers\.3\.weight"):
        unchanged.holds(slot, chunk, buffer.address)
