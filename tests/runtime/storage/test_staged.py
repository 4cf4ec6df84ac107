"""Staging: which copies run at the same time, which call has which buffer, and what happens after an error.

The copier spoils its target and reads its source late, so that the contract suite finds a wait that is missing.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from planner.errors import StorageIOError
from runtime.storage import StagedStore

from ..memory import COPIES, Memory, read_slot, write_slot
from .fakes import SlowCopier, SlowCopy

MIB = 1 << 20
BUFFER = MIB // 4

Call = tuple[str, int, int]


class Drive:
    """The system calls of a drive, recorded: direction, offset and bytes. The call with number `fails_at` fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Call] = []
        self.fails_at = -1
        for action, name in (("write", "pwritev"), ("read", "preadv")):
            monkeypatch.setattr(os, name, self._recording(action, getattr(os, name)))

    def _recording(self, action: str, real: Callable[..., int]) -> Callable[..., int]:
        def call(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            if len(self.calls) == self.fails_at:
                raise OSError(5, "Input/output error")
            self.calls.append((action, offset, len(buffers[0])))
            return real(descriptor, buffers, offset)

        return call


class Log(SlowCopier):
    """Adds copies to the drive's list of calls."""

    def __init__(self, drive: Drive) -> None:
        super().__init__()
        self._drive = drive

    def _begin(self, direction: str, target_address: int, source_address: int, size_bytes: int) -> SlowCopy:
        self._drive.calls.append((direction, 0, size_bytes))
        return super()._begin(direction, target_address, source_address, size_bytes)


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., StagedStore]]:
    stores: list[StagedStore] = []

    def make(copier: SlowCopier | None = None, **options: Any) -> StagedStore:
        stores.append(StagedStore([tmp_path], copier or SlowCopier(), budget_bytes=None, buffer_bytes=BUFFER, **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Drive:
    return Drive(monkeypatch)


Open = Callable[..., StagedStore]


@pytest.mark.parametrize(("usual", "during"), [(0.005, 0.0005), (0.0001, 0.0001)])
def test_threads_take_short_turns_until_the_last_one_is_closed(open_store: Open, usual: float, during: float) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(usual)
    try:
        stores = [open_store(), open_store()]
        for store in stores:
            assert sys.getswitchinterval() == pytest.approx(during, rel=0.02)
            store.close()
            store.close()
        assert sys.getswitchinterval() == pytest.approx(usual, rel=0.02)
        store = open_store()
        sys.setswitchinterval(0.02)  # somebody else's
        store.close()
        assert sys.getswitchinterval() == pytest.approx(0.02, rel=0.02)
    finally:
        sys.setswitchinterval(before)


def test_the_next_part_is_fetched_while_one_is_written(open_store: Open, drive: Drive) -> None:
    store = open_store(Log(drive))
    slot, memory = store.allocate(4 * BUFFER, "weights"), Memory(4 * BUFFER)
    drive.calls.clear()
    write_slot(store, slot, memory.address)
    assert [call[0] for call in drive.calls] == ["out", "out", "write", "out", "write", "out", "write", "write"]


def test_each_thread_has_two_buffers_and_later_calls_use_them_again(open_store: Open) -> None:
    copier = SlowCopier()
    store = open_store(copier)
    slots = [store.allocate(MIB, f"block {number}") for number in range(3)]
    memories = [Memory(MIB, random=True) for _ in slots]
    barrier = threading.Barrier(3)

    def carry(number: int) -> None:
        barrier.wait()
        for _ in range(5):
            write_slot(store, slots[number], memories[number].address)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(carry, range(3)))
    taken = len(copier.buffers)
    assert set(copier.buffers) == {BUFFER} and 2 <= taken <= 6
    for number in range(3):
        write_slot(store, slots[number], memories[number].address)
    assert len(copier.buffers) == taken


@pytest.mark.parametrize("fails_at", [0, 1, 2])
@pytest.mark.parametrize("call", ["write", "read"])
def test_an_error_of_the_drive_ends_the_call_after_all_its_copies(
    open_store: Open, drive: Drive, call: str, fails_at: int
) -> None:
    copies: list[SlowCopy] = []

    class Copier(SlowCopier):
        def _begin(self, direction: str, target_address: int, source_address: int, size_bytes: int) -> SlowCopy:
            copies.append(SlowCopy(target_address, source_address, size_bytes, 0.02))
            return copies[-1]

    store = open_store(Copier())
    slot = store.allocate(4 * BUFFER, "layers.3.weight")
    memory = Memory(slot.size_bytes)
    drive.calls.clear()
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
