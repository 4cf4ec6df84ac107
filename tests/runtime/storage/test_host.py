"""The host tier: the address of its slab, and how the slab is taken, pinned and freed."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.errors import StorageError, StorageFullError
from runtime.storage import HostStore, cut_slot
from runtime.system import PIN_CHUNK_BYTES, HostLimit

from ..memory import Memory, read_slot, write_slot
from .fakes import RecordingPinner

MIB = 1 << 20
LIMITS = (HostLimit(what="the machine has available", available_bytes=1 << 40, remedy="lower host_budget"),)


def resident_bytes(store: HostStore) -> int:
    """Return how many bytes of the slab have pages."""
    return os.fstat(store.allocate(1, "a page").extents[0].file_descriptor).st_blocks * 512


def test_pages_are_taken_as_they_are_written_to_unless_asked_for_and_no_byte_more() -> None:
    lazy, eager = HostStore(8 * MIB, limits=LIMITS), HostStore(2 * MIB + 5000, pinner=RecordingPinner(), limits=LIMITS)
    assert resident_bytes(lazy) == 0
    assert resident_bytes(eager) == eager.capacity_bytes == eager.limit_bytes == 2 * MIB + 4096
    slot, memory = lazy.allocate(2 * MIB, "weights"), Memory(2 * MIB, random=True)
    write_slot(lazy, slot, memory.address)
    assert resident_bytes(lazy) == 2 * MIB
    for store in (lazy, eager):
        store.close()


def test_the_slab_is_pinned_whole_and_given_back_after_that() -> None:
    pinner = RecordingPinner()
    store = HostStore(4 * MIB, pinner=pinner, limits=LIMITS)
    assert store.pinned and resident_bytes(store) == 4 * MIB
    address, descriptor = store.address, store.allocate(MIB, "weights").extents[0].file_descriptor
    assert f"{address:x}-" in Path("/proc/self/maps").read_text()
    store.close()
    store.close()
    assert pinner.calls == [("pin", address, 4 * MIB), ("unpin", address, 4 * MIB)] and not store.pinned
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert f"{address:x}-" not in Path("/proc/self/maps").read_text()


def test_what_nobody_closes_is_unpinned_before_its_memory_is_freed() -> None:
    pinner = RecordingPinner()
    store = HostStore(4 * MIB, pinner=pinner)
    address = store.address
    del store
    gc.collect()
    assert pinner.calls == [("pin", address, 4 * MIB), ("unpin", address, 4 * MIB)]


def test_a_broken_pinner_keeps_no_memory() -> None:
    pinner = RecordingPinner(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        HostStore(4 * MIB, pinner=pinner, limits=LIMITS)
    ((_, address, _),) = pinner.calls
    assert f"{address:x}-" not in Path("/proc/self/maps").read_text()


def test_without_pinning_it_works_on_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    pinner = RecordingPinner(StorageError("cannot pin 4,194,304 bytes; raise the limit"))
    store = HostStore(4 * MIB, pinner=pinner, limits=LIMITS)
    assert [record.getMessage() for record in caplog.records] == [
        "host memory is not pinned, and copies will be slower: cannot pin 4,194,304 bytes; raise the limit"
    ]
    assert not store.pinned
    store.allocate(MIB, "before")
    slot, memory = store.allocate(MIB, "weights"), Memory(MIB, random=True)
    write_slot(store, slot, memory.address)
    assert slot.address is not None and ctypes.string_at(slot.address, MIB) == memory.content
    store.close()
    assert [call[0] for call in pinner.calls] == ["pin"]


def test_more_than_the_machine_allows_and_less_than_a_page_are_refused() -> None:
    limits = (*LIMITS, HostLimit(what="a group leaves", available_bytes=4 * MIB, remedy="lower host_budget"))
    HostStore(4 * MIB, limits=limits).close()
    with pytest.raises(StorageFullError, match="8,388,608 bytes does not fit: a group leaves 4,194,304 bytes; lower"):
        HostStore(8 * MIB, limits=limits)
    with pytest.raises(StorageFullError, match="lower host_budget"):
        HostStore(1 << 60)  # the limits of this machine
    for size_bytes in (0, -1, 4095):
        with pytest.raises(StorageError, match=f"host tier of {size_bytes} bytes.*raise host_budget, or leave it out"):
            HostStore(size_bytes, limits=LIMITS)


def test_a_system_that_has_no_pages_left_is_an_error_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StorageFullError, match=r"refuses 4,194,304 bytes.*errno 12.*lower host_budget"):
        HostStore(4 * MIB, pinner=RecordingPinner(), limits=LIMITS)
    monkeypatch.undo()
    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(StorageError, match="lower host_budget"):
        HostStore(4 * MIB, limits=LIMITS)


def test_a_foreign_slot_moves_nothing() -> None:
    store, other = HostStore(MIB, limits=LIMITS), HostStore(64 * MIB, limits=LIMITS)
    slot, memory = other.allocate(32 * MIB, "foreign"), Memory(32 * MIB)
    uses: list[Callable[[], None]] = [
        lambda: write_slot(store, slot, memory.address),
        lambda: read_slot(store, slot, memory.address),
        lambda: store.write_chunk(slot, cut_slot(slot, MIB)[-1], memory.address),
        lambda: store.read_chunk(slot, cut_slot(slot, MIB)[-1], memory.address),
    ]
    for use in uses:
        with pytest.raises(StorageError, match="'foreign' is not of this store"):
            use()
    store.close()
    other.close()


def test_no_extent_crosses_a_border_of_pinned_chunks() -> None:
    store = HostStore(2 * PIN_CHUNK_BYTES + 8 * MIB, limits=LIMITS)
    first = store.allocate(PIN_CHUNK_BYTES - MIB, "up to the border")
    slot = store.allocate(PIN_CHUNK_BYTES + 4 * MIB, "over two borders")
    assert [extent.length_bytes for extent in slot.extents] == [MIB, PIN_CHUNK_BYTES, 3 * MIB]
    assert [extent.offset_bytes for extent in slot.extents] == [PIN_CHUNK_BYTES - MIB, PIN_CHUNK_BYTES, 2 * PIN_CHUNK_BYTES]
    store.release(slot)
    store.release(first)
    assert len(store.allocate(store.capacity_bytes, "all of it, joined again").extents) == 3
    store.close()
