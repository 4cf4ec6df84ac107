"""The contract of all stores, for every kind of store that needs no GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.storage import HostStore, KvikioStore, PosixStore, StagedStore, Store
from runtime.system import HostLimit

from ..memory import Memory
from .contract import StoreCase, StoreContract
from .fake_kvikio import FakeKvikio
from .slow_copier import SlowCopier

PLENTY = (HostLimit(what="a test has", available_bytes=1 << 40, remedy="nothing"),)


class NoPinner:
    """Pins nothing, but knows what it should unpin."""

    def __init__(self) -> None:
        self.live: list[tuple[int, int]] = []

    def pin(self, address: int, size_bytes: int) -> None:
        self.live.append((address, size_bytes))

    def unpin(self, address: int, size_bytes: int) -> None:
        self.live.remove((address, size_bytes))


def files(count: int) -> Callable[[list[Path], int], Store]:
    return lambda parents, size: PosixStore(parents[:count], budget_bytes=size)


MAKERS: dict[str, tuple[Callable[[list[Path], int], Store], int, str]] = {
    "posix, one directory": (files(1), 1, "storage_budget"),
    "posix, three directories": (files(3), 3, "storage_budget"),
    "posix, page cache": (lambda parents, size: PosixStore(parents[:1], budget_bytes=size, direct=False), 1, "storage_budget"),
    "host": (lambda _, size: HostStore(size, limits=PLENTY), 1, "host_budget"),
    "host, pinned": (lambda _, size: HostStore(size, limits=PLENTY, pinner=NoPinner()), 1, "host_budget"),
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
        parents = [Path(base, str(number)) for number in range(3)]
        for parent in parents:
            parent.mkdir()
        stores: list[Store] = []

        def make(size_bytes: int) -> Store:
            stores.append(maker(parents, size_bytes))
            return stores[-1]

        yield StoreCase(
            make=make,
            memory=lambda size, random: Memory(size, random=random),
            option=option,
            stripes=stripes,
            whole=request.param not in ("staged", "kvikio"),
        )
        for store in stores:
            store.close()
        assert all(not list(parent.iterdir()) for parent in parents)


class TestStore(StoreContract):
    """The contract."""
