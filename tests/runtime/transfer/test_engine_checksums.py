"""Checksums: a change on a drive is an error, a change by user code is not."""

from __future__ import annotations

import gc
import pickle
import re
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from planner.errors import ChecksumError, StorageError, UnsupportedError
from runtime.storage import PageSums, PosixStore, Slot
from runtime.transfer import Engine, TorchMemory

from ..memory import Memory, break_io, flip_a_bit, write_slot
from .gate import nothing

MIB = 1 << 20
CHUNK = 256 << 10


@pytest.fixture
def engine(store: PosixStore) -> Iterator[Engine]:
    engine = Engine(store, checksums=True, threads=2, chunk_bytes=CHUNK)
    yield engine
    engine.close()


@pytest.fixture
def buffer() -> Memory:
    return Memory(3 * MIB, random=True)


def written(store: PosixStore, engine: Engine, buffer: Memory) -> Slot:
    slot = store.allocate(3 * MIB, "layers.3.weight")
    engine.write(slot, buffer.address, nothing).wait(30)
    return slot


def test_what_is_unchanged_passes(store: PosixStore, engine: Engine, buffer: Memory) -> None:
    before = buffer.content
    slot = written(store, engine, buffer)
    buffer.fill()
    for _ in range(2):
        engine.read(slot, buffer.address, nothing).wait(30)
    assert buffer.content == before
    buffer.fill()
    engine.write(slot, buffer.address, nothing).wait(30)  # replaces the old checksums
    engine.read(slot, buffer.address, nothing).wait(30)


@pytest.mark.parametrize("offset_bytes", [0, CHUNK - 1, MIB + 17])
def test_a_flipped_bit_is_found(store: PosixStore, engine: Engine, buffer: Memory, offset_bytes: int) -> None:
    slot = written(store, engine, buffer)
    flip_a_bit(slot.extents[-1], offset_bytes)
    told: list[StorageError | None] = []
    with pytest.raises(ChecksumError) as raised:
        engine.read(slot, buffer.address, lambda t: told.append(t.error)).wait(30)
    error = raised.value
    assert told == [error]
    assert error.path == str(slot.extents[-1].path) and error.block == "layers.3.weight"
    begin = error.offset_bytes - slot.extents[-1].offset_bytes
    assert begin == offset_bytes // 4096 * 4096
    assert error.expected != error.found
    sums = f"{error.expected:016x}", f"{error.found:016x}"
    for part in ("'layers.3.weight'", error.path, f"offset {error.offset_bytes}", *sums):
        assert part in str(error)
    assert "restart from the last checkpoint" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (again.args, again.offset_bytes, again.found) == (error.args, error.offset_bytes, error.found)
    engine.write(slot, buffer.address, nothing).wait(30)
    engine.read(slot, buffer.address, nothing).wait(30)


def test_what_user_code_may_have_written_is_let_pass_and_without_checksums_everything(
    store: PosixStore, engine: Engine, buffer: Memory
) -> None:
    slot, other = written(store, engine, buffer), written(store, engine, buffer)
    for changed in (slot, other):
        flip_a_bit(changed.extents[0], 5)
    engine.forget_sums(slot)
    engine.read(slot, buffer.address, nothing).wait(30)
    with pytest.raises(ChecksumError):
        engine.read(other, buffer.address, nothing).wait(30)
    careless = Engine(store)
    careless.forget_sums(other)
    careless.read(other, buffer.address, nothing).wait(30)
    careless.close()


def test_sums_go_with_the_slot(store: PosixStore, engine: Engine, buffer: Memory) -> None:
    slot = written(store, engine, buffer)
    places = slot.extents
    store.release(slot)
    gone = weakref.ref(slot)
    del slot
    gc.collect()
    assert gone() is None, "nothing holds on to a slot that was released"
    again = store.allocate(3 * MIB, "in its place")
    assert again.extents == places
    write_slot(store, again, buffer.address)  # not by the engine
    engine.read(again, buffer.address, nothing).wait(30)


def test_a_failed_write_leaves_no_valid_sum(
    store: PosixStore, engine: Engine, buffer: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = written(store, engine, buffer)
    buffer.fill()

    break_io(monkeypatch, "pwritev")
    with pytest.raises(StorageError):
        engine.write(slot, buffer.address, nothing).wait(30)
    monkeypatch.undo()
    with pytest.raises(ChecksumError):
        engine.read(slot, buffer.address, nothing).wait(30)


def test_measuring_counts_the_checksums_in(store: PosixStore, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[int] = []
    for name in ("note", "compare"):
        real = getattr(PageSums, name)

        def spy(self: PageSums, offset: int, address: int, length: int, real: Callable[..., object] = real) -> object:
            summed.append(length)
            return real(self, offset, address, length)

        monkeypatch.setattr(PageSums, name, spy)
    engine.measure(8 * MIB)
    assert sum(summed) >= 2 * 8 * MIB


def test_memory_of_a_device_is_refused(store: PosixStore) -> None:
    memory = TorchMemory(torch.device("cuda"))
    with pytest.raises(UnsupportedError, match=re.escape("leave the option checksums out")):
        Engine(store, memory=memory, checksums=True)
    Engine(store, memory=memory).close()
