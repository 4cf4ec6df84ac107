"""The engine over real files: blocks arrive unchanged, or an error says so; measured rates are real; it ends in good order."""

from __future__ import annotations

import gc
import os
import pickle
import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from planner.errors import ChecksumError, StorageError, StorageFullError, StorageIOError, UnsupportedError
from runtime.storage import HostStore, PosixStore, Slot
from runtime.transfer import Engine, TorchMemory

from ..memory import Memory, break_io, flip_a_bit, read_slot, write_slot
from ..processes import Forking
from .gate import nothing

MIB = 1 << 20


@pytest.fixture
def engine(store: PosixStore) -> Iterator[Engine]:
    engine = Engine(store, threads=3, chunk_bytes=64 << 10)
    yield engine
    engine.close()


def test_measuring(store: PosixStore, engine: Engine) -> None:
    kept = store.allocate(MIB, "kept")
    memory = Memory(MIB, random=True)
    write_slot(store, kept, memory.address)
    rates = engine.measure(8 * MIB)
    for each in rates:
        assert 1e5 < each.bytes_per_second < 1e12 and 1e5 < each.duplex_bytes_per_second < 1e12
        assert 1e-7 < each.latency_seconds < 10
    assert engine.write_link.moved_bytes == engine.read_link.moved_bytes == 0
    assert store.used_bytes == MIB
    received = Memory(MIB)
    read_slot(store, kept, received.address)
    assert received.content == memory.content


def test_measuring_where_little_room_is(tmp_path: Path) -> None:
    store = PosixStore([tmp_path], budget_bytes=3 * MIB)
    engine = Engine(store)
    engine.verify()
    assert engine.measure().write.bytes_per_second > 0
    assert store.used_bytes == 0 and store.capacity_bytes <= 3 * MIB
    slot = store.allocate(3 * MIB, "everything")
    with pytest.raises(StorageFullError):
        engine.measure()
    store.release(slot)
    engine.close()
    store.close()


def test_an_error_while_measuring_leaves_nothing_behind(
    store: PosixStore, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = threading.active_count()
    break_io(monkeypatch, "preadv")
    with pytest.raises(StorageIOError):
        engine.measure(MIB)
    assert store.used_bytes == 0
    assert threading.active_count() == threads


def test_closing_stops_the_threads_and_links_have_the_tiers_name(store: PosixStore) -> None:
    with closing(HostStore(MIB)) as host, closing(Engine(host)) as other:
        assert list(other.links) == ["device->host", "host->device"]
    before = threading.active_count()
    engine = Engine(store)
    assert list(engine.links) == ["device->storage", "storage->device"]
    assert engine.links["storage->device"] is engine.read_link
    assert threading.active_count() == before + 8
    slot = store.allocate(4 * MIB, "weights")
    memory = Memory(4 * MIB)
    transfer = engine.write(slot, memory.address, nothing)
    engine.close()
    engine.close()
    assert transfer.done and threading.active_count() == before
    with pytest.raises(StorageError, match="the link storage->device is closed"):
        engine.read(slot, memory.address, nothing)


def test_the_interpreter_ends_with_work_in_flight(forking: Forking, tmp_path: Path) -> None:
    """Nothing moves any more after the engine's exit function, and queued transfers are dropped."""
    code = """
import atexit, mmap, ctypes, sys, time
from runtime.transfer import Engine
from runtime.storage import PosixStore
memory = mmap.mmap(-1, 64 << 20)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
store = PosixStore([sys.argv[1]], budget_bytes=None)
transfers = []
def look():  # runs after the exit function of the engine
    before = engine.write_link.busy_seconds
    time.sleep(0.05)
    print(engine.write_link.busy_seconds == before, transfers[-1].done)
atexit.register(look)
engine = Engine(store)
slots = [store.allocate(64 << 20, str(number)) for number in range(4)]
for slot in slots * 50:
    transfers.append(engine.write(slot, address, lambda transfer: None))
transfers[0].wait()
raise ValueError("in the middle")
"""
    status, printed, errors = forking.run(code, tmp_path)
    assert status == 1 and errors.count("Error") == errors.count("ValueError: in the middle") == 1, errors
    assert printed == "True False\n" and list(tmp_path.iterdir()) == []


def test_verifying_finds_bytes_that_differ(store: PosixStore, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.verify(MIB)
    engine.check()
    assert store.used_bytes == engine.write_link.moved_bytes == engine.read_link.moved_bytes == 0
    real = os.preadv

    def damaged(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = real(descriptor, buffers, offset)
        buffers[0].cast("B")[count - 1] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", damaged)
    with pytest.raises(StorageError, match=r"1,052,672 bytes that were written to .*\.spill came back different"):
        engine.verify(MIB)
    assert store.used_bytes == 0


# -- checksums: a change on a drive is an error, a change by user code is not

CHUNK = 256 << 10


@pytest.fixture
def summing(store: PosixStore) -> Iterator[Engine]:
    engine = Engine(store, checksums=True, threads=2, chunk_bytes=CHUNK)
    yield engine
    engine.close()


@pytest.fixture
def buffer() -> Memory:
    return Memory(3 * MIB, random=True)


@pytest.fixture
def written(store: PosixStore, summing: Engine, buffer: Memory) -> Slot:
    slot = store.allocate(3 * MIB, "layers.3.weight")
    summing.write(slot, buffer.address, nothing).wait(30)
    return slot


@pytest.mark.parametrize("offset_bytes", [0, CHUNK - 1, MIB + 17])
def test_a_flipped_bit_is_found_and_what_is_unchanged_passes(
    summing: Engine, buffer: Memory, written: Slot, offset_bytes: int
) -> None:
    before = buffer.content
    buffer.fill()
    for _ in range(2):
        summing.read(written, buffer.address, nothing).wait(30)
    assert buffer.content == before
    flip_a_bit(written.extents[-1], offset_bytes)
    told: list[StorageError | None] = []
    with pytest.raises(ChecksumError) as raised:
        summing.read(written, buffer.address, lambda t: told.append(t.error)).wait(30)
    error = raised.value
    assert told == [error]
    assert error.path == str(written.extents[-1].path) and error.block == "layers.3.weight"
    assert error.offset_bytes - written.extents[-1].offset_bytes == offset_bytes // 4096 * 4096
    assert error.expected != error.found
    sums = f"{error.expected:016x}", f"{error.found:016x}"
    for part in ("'layers.3.weight'", error.path, f"offset {error.offset_bytes}", *sums, "restart from the last checkpoint"):
        assert part in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (again.args, again.offset_bytes, again.found) == (error.args, error.offset_bytes, error.found)
    summing.write(written, buffer.address, nothing).wait(30)  # replaces the old checksums
    summing.read(written, buffer.address, nothing).wait(30)


def test_sums_go_with_the_slot(store: PosixStore, summing: Engine, buffer: Memory) -> None:
    slot = store.allocate(3 * MIB, "layers.3.weight")
    summing.write(slot, buffer.address, nothing).wait(30)
    places = slot.extents
    store.release(slot)
    gone = weakref.ref(slot)
    del slot
    gc.collect()
    assert gone() is None, "nothing holds on to a slot that was released"
    again = store.allocate(3 * MIB, "in its place")
    assert again.extents == places
    write_slot(store, again, buffer.address)  # not by the engine
    summing.read(again, buffer.address, nothing).wait(30)


def test_a_failed_write_leaves_no_valid_sum(
    summing: Engine, buffer: Memory, written: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer.fill()
    break_io(monkeypatch, "pwritev")
    with pytest.raises(StorageError):
        summing.write(written, buffer.address, nothing).wait(30)
    monkeypatch.undo()
    with pytest.raises(ChecksumError, match="block 'layers.3.weight' in .* restart from the last checkpoint"):
        summing.read(written, buffer.address, nothing).wait(30)


def test_memory_of_a_device_is_refused(store: PosixStore) -> None:
    memory = TorchMemory(torch.device("cuda"))
    with pytest.raises(UnsupportedError, match=re.escape("leave the option checksums out")):
        Engine(store, memory=memory, checksums=True)
    Engine(store, memory=memory).close()
