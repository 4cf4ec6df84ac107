"""Staging: which copies run at the same time, which call has which buffer, and what happens after an error.

The copier spoils its target and reads its source late, so that the contract suite finds a wait that is missing.
"""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from planner.errors import StorageIOError
from runtime.storage.posix import PosixStore
from runtime.storage.staged import StagedStore
from runtime.storage.store import Chunk, Slot, cut_slot
from runtime.transfer.engine import Engine

from ..slot_copies import COPIES, read_slot, write_slot
from .memory import Memory
from .slow_copier import SlowCopier, SlowCopy

MIB = 1 << 20
BUFFER = MIB // 4


def test_threads_take_short_turns_while_it_is_open(tmp_path: Path) -> None:
    before = sys.getswitchinterval()
    store = StagedStore(PosixStore([tmp_path], budget_bytes=None), SlowCopier())
    assert sys.getswitchinterval() == min(before, 0.0005)
    store.close()
    store.close()
    assert sys.getswitchinterval() == before


class Drive(PosixStore):
    """Records the calls. The call with number `fails_at` fails."""

    def __init__(self, folder: Path) -> None:
        super().__init__([folder], budget_bytes=None)
        self.calls: list[tuple[str, int, int]] = []
        self.fails_at = -1

    def write_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        self._note("write", slot, chunk)
        super().write_chunk(slot, chunk, address)

    def read_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None:
        self._note("read", slot, chunk)
        super().read_chunk(slot, chunk, address)

    def _note(self, action: str, slot: Slot, chunk: Chunk) -> None:
        if len(self.calls) == self.fails_at:
            raise StorageIOError(path=str(chunk.extent.path), block=slot.name, errno=errno.EIO, action=action)
        self.calls.append((action, chunk.file_offset_bytes, chunk.length_bytes))


class Log(SlowCopier):
    """Adds copies to the drive's list of calls."""

    def __init__(self, drive: Drive) -> None:
        super().__init__()
        self._drive = drive

    def _begin(self, direction: str, target_address: int, source_address: int, size_bytes: int) -> SlowCopy:
        self._drive.calls.append((direction, 0, size_bytes))
        return super()._begin(direction, target_address, source_address, size_bytes)


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Drive]:
    drive = Drive(tmp_path)
    yield drive
    drive.close()


def test_chunks_of_a_chunk_go_to_their_places_in_the_file(drive: Drive) -> None:
    store = StagedStore(drive, SlowCopier(), buffer_bytes=BUFFER)
    store.allocate(MIB, "before")
    slot = store.allocate(2 * MIB, "weights")
    memory = Memory(slot.size_bytes, random=True)
    chunk = cut_slot(slot, MIB - 4096)[1]
    store.write_chunk(slot, chunk, memory.address)
    begins = [chunk.file_offset_bytes + number * BUFFER for number in range(4)]
    assert drive.calls == [("write", begin, min(BUFFER, begins[0] + chunk.length_bytes - begin)) for begin in begins]


def test_the_next_chunk_is_fetched_while_one_is_written(drive: Drive) -> None:
    store = StagedStore(drive, Log(drive), buffer_bytes=BUFFER)
    slot, memory = store.allocate(4 * BUFFER, "weights"), Memory(4 * BUFFER)
    write_slot(store, slot, memory.address)
    assert [call[0] for call in drive.calls] == ["out", "out", "write", "out", "write", "out", "write", "write"]


def test_the_next_chunk_is_read_while_one_goes_to_the_device(drive: Drive) -> None:
    class Held(SlowCopy):
        """Ends when somebody waits for it, and records the wait."""

        def run(self) -> None:
            arrived.wait(10)
            super().run()

        def wait(self) -> None:
            if self.is_alive():
                drive.calls.append(("wait", 0, 0))
            arrived.set()
            super().wait()

    class Copier(Log):
        def _begin(self, direction: str, target_address: int, source_address: int, size_bytes: int) -> SlowCopy:
            drive.calls.append((direction, 0, size_bytes))
            return Held(target_address, source_address, size_bytes, 0)

    arrived = threading.Event()
    store = StagedStore(drive, Copier(drive), buffer_bytes=BUFFER)
    slot = store.allocate(3 * BUFFER, "weights")
    memory = Memory(slot.size_bytes)
    read_slot(store, slot, memory.address)
    # The store waits for the first copy only when it needs the buffer again.
    assert [call[0] for call in drive.calls][:6] == ["read", "in", "read", "in", "wait", "read"]


def test_each_thread_has_two_buffers_and_later_calls_use_them_again(drive: Drive) -> None:
    copier = SlowCopier()
    store = StagedStore(drive, copier, buffer_bytes=BUFFER)
    slots = [store.allocate(MIB, f"block {number}") for number in range(3)]
    memories = [Memory(MIB, random=True) for _ in slots]
    barrier = threading.Barrier(3)

    def carry(number: int) -> None:
        barrier.wait()
        for _ in range(5):
            write_slot(store, slots[number], memories[number].address)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(carry, range(3)))
    assert set(copier.buffers) == {BUFFER} and 2 <= len(copier.buffers) <= 6
    assert store.staging_bytes == len(copier.buffers) * BUFFER
    taken = len(copier.buffers)
    for number in range(3):
        write_slot(store, slots[number], memories[number].address)
    assert len(copier.buffers) == taken
    store.close()
    assert store.staging_bytes == 0


@pytest.mark.parametrize("fails_at", [0, 1, 2])
@pytest.mark.parametrize("call", ["write", "read"])
def test_an_error_of_the_drive_ends_the_call_after_all_its_copies(drive: Drive, call: str, fails_at: int) -> None:
    copies: list[SlowCopy] = []

    class Copier(SlowCopier):
        def _begin(self, direction: str, target_address: int, source_address: int, size_bytes: int) -> SlowCopy:
            copies.append(SlowCopy(target_address, source_address, size_bytes, 0.02))
            return copies[-1]

    store = StagedStore(drive, Copier(), buffer_bytes=BUFFER)
    slot = store.allocate(4 * BUFFER, "layers.3.weight")
    memory = Memory(slot.size_bytes)
    drive.fails_at = fails_at
    with pytest.raises(StorageIOError, match=f"cannot {call} block 'layers.3.weight'"):
        COPIES[call](store, slot, memory.address)
    assert not any(copy.is_alive() for copy in copies)
    assert len(copies) == (fails_at if call == "read" else fails_at + 2)
    drive.fails_at = -1
    content = memory.fill()
    write_slot(store, slot, memory.address)
    back = Memory(slot.size_bytes)
    read_slot(store, slot, back.address)
    assert back.content == content


def test_an_engine_carries_blocks_through_the_buffers(drive: Drive) -> None:
    copier = SlowCopier()
    store = StagedStore(drive, copier, buffer_bytes=BUFFER)
    engine = Engine(store, threads=2, chunk_bytes=MIB)
    memories = [Memory(3 * MIB, random=True) for _ in range(6)]
    expected = [memory.content for memory in memories]
    slots = [store.allocate(3 * MIB, f"block {number}") for number in range(6)]
    done: list[object] = []
    for submit in (engine.write, engine.read):
        transfers = [submit(slot, memory.address, done.append) for slot, memory in zip(slots, memories, strict=True)]
        for transfer in transfers:
            transfer.wait()
        if submit == engine.write:
            for memory in memories:
                memory.fill()
    assert [memory.content for memory in memories] == expected
    assert len(done) == 12 and len(copier.buffers) <= 4  # two threads at a time
    engine.close()
