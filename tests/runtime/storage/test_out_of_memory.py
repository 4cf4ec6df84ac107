"""Memory that runs out at each line that takes or frees a slot: no byte of a store is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.storage import HostStore, PosixStore, Slot

from ...line_tracing import can_run_out_of_memory, out_of_memory_at, places_in

PAGE = 4096
Stores = PosixStore | HostStore
WATCHED = tuple(f"runtime/storage/{name}.py" for name in ("slot_store", "file_space", "host"))


def two_files(folder: Path) -> Stores:
    folders = [folder / name for name in "ab"]
    for each in folders:
        each.mkdir(exist_ok=True)
    return PosixStore(folders, budget_bytes=40 * PAGE, direct=False)


def host(folder: Path) -> Stores:
    return HostStore(40 * PAGE)


@pytest.mark.parametrize("make", [two_files, host])
def test_no_byte_is_lost(make: Callable[[Path], Stores], tmp_path: Path) -> None:
    def use(store: Stores, held: list[Slot]) -> None:
        """Take slots, free every other one and take one that fits into no hole, until a release fails."""
        held += [store.allocate(4 * PAGE, "w") for _ in range(8)]
        for slot in held[::2]:
            store.release(slot)
            held.remove(slot)
        held.append(store.allocate(12 * PAGE, "w"))

    store = make(tmp_path)
    places = places_in(WATCHED, lambda: use(store, []), only=can_run_out_of_memory)
    store.close()
    assert len(places) > 20
    for place in places:
        store, held = make(tmp_path), list[Slot]()
        hit = out_of_memory_at(WATCHED, place, lambda store=store, held=held: use(store, held))  # type: ignore[misc]
        assert hit and store.used_bytes == sum(slot.size_bytes for slot in store._in_use), place
        for slot in list(store._in_use):
            store.release(slot)
        assert store.used_bytes == 0 and sum(space.free_bytes for space in store._spaces.values()) == store.capacity_bytes, place
        store.release(store.allocate(40 * PAGE, "all"))
        store.close()
