"""The contract of all stores, for every kind of store that needs no GPU; and no byte of theirs is lost where memory runs out."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from runtime.storage import HostStore, KvikioStore, PosixStore, Slot, StagedStore, Store
from runtime.system import HostLimit

from ...line_tracing import can_run_out_of_memory, out_of_memory_at, places_in
from ..memory import Memory
from .contract import StoreCase, StoreContract, opened
from .fakes import FakeKvikio, RecordingPinner, SlowCopier

PLENTY = (HostLimit(what="a test has", available_bytes=1 << 40, remedy="nothing"),)


Make = Callable[[Sequence[Path], int], Store]


def files(count: int) -> Make:
    return lambda parents, size: PosixStore(parents[:count], budget_bytes=size)


MAKERS: dict[str, tuple[Make, int, str]] = {
    "posix, one directory": (files(1), 1, "storage_budget"),
    "posix, three directories": (files(3), 3, "storage_budget"),
    "posix, page cache": (lambda parents, size: PosixStore(parents[:1], budget_bytes=size, direct=False), 1, "storage_budget"),
    "host": (lambda _, size: HostStore(size, limits=PLENTY), 1, "host_budget"),
    "host, pinned": (lambda _, size: HostStore(size, limits=PLENTY, pinner=RecordingPinner()), 1, "host_budget"),
    "staged": (
        # No chunk is a multiple of these buffers, and every chunk needs several of them.
        lambda parents, size: StagedStore(parents[:2], SlowCopier(), budget_bytes=size, buffer_bytes=300_000),
        2,
        "storage_budget",
    ),
    "kvikio": (lambda parents, size: KvikioStore(parents[:2], budget_bytes=size, kvikio=FakeKvikio()), 2, "storage_budget"),
}


@pytest.fixture(params=[*MAKERS, "posix, in memory"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreCase]:
    in_memory = request.param == "posix, in memory"
    maker, stripes, option = MAKERS["posix, one directory" if in_memory else request.param]
    with tempfile.TemporaryDirectory(dir="/dev/shm" if in_memory else tmp_path) as base:
        with opened(
            maker,
            [Path(base, str(number)) for number in range(3)],
            memory=lambda size, random: Memory(size, random=random),
            option=option,
            stripes=stripes,
            whole=request.param not in ("staged", "kvikio"),
        ) as case:
            yield case


class TestStore(StoreContract):
    """The contract."""


# -- memory that runs out at each line that takes or frees a slot

PAGE = 4096
Stores = PosixStore | HostStore
WATCHED = tuple(f"runtime/storage/{name}.py" for name in ("store", "file_space", "host"))


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
