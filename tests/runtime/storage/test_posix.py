"""Stores in files: where the files are, who can read them, and how they are opened."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.errors import StorageFullError
from runtime.storage.posix import PosixStore
from runtime.storage.store import ALIGNMENT_BYTES

from ..slot_copies import read_slot, write_slot
from .memory import Memory

MakeStore = Callable[..., PosixStore]
MIB = 1 << 20


def test_files_are_private_and_under_the_directories(store: PosixStore) -> None:
    slot = store.allocate(MIB, "weights")
    for extent, directory in zip(slot.extents, store.directories, strict=True):
        assert extent.path.parent == directory
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
        assert stat.S_IMODE(os.stat(extent.path).st_mode) == 0o600


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


def test_direct_tells_which_way_is_taken(store: PosixStore) -> None:
    descriptors = [extent.file_descriptor for extent in store.allocate(MIB, "weights").extents]
    flags = [bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT) for descriptor in descriptors]
    assert flags == [store.direct] * len(flags)


def test_extents_tell_their_drive(store: PosixStore) -> None:
    extents = store.allocate(5 * MIB, "weights").extents
    assert [extent.drive for extent in extents] == [os.stat(extent.path).st_dev for extent in extents]
    assert set(store.drives) == {extent.drive for extent in extents} and len(set(store.drives)) == len(store.drives)


def test_the_page_cache_can_be_asked_for(tmp_path: Path) -> None:
    store = PosixStore([tmp_path], budget_bytes=None, direct=False)
    slot = store.allocate(MIB, "weights")
    assert not store.direct and not fcntl.fcntl(slot.extents[0].file_descriptor, fcntl.F_GETFL) & os.O_DIRECT
    memory, read = Memory(MIB, random=True), Memory(MIB)
    write_slot(store, slot, memory.address)
    read_slot(store, slot, read.address)
    assert read.content == memory.content
    store.close()


def test_the_storage_budget_is_named_with_what_is_in_use(make_store: MakeStore) -> None:
    store = make_store(budget_bytes=6 * MIB)
    store.allocate(5 * MIB, "weights")
    with pytest.raises(
        StorageFullError, match=r"\(5,242,880 in use\), but the storage_budget allows 6,291,456; raise storage_budget or"
    ):
        store.allocate(2 * MIB, "one too many")
