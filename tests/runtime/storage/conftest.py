"""Stores to run the contract suite over, and the helpers beside this as modules (tests are no package)."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.storage.link import Link
from runtime.storage.posix import PosixStore

from ..direct_io import refuse_direct_io

for _name in ("memory", "gate", "contract", "slow_copier", "fake_kvikio"):
    if f"storage_{_name}" not in sys.modules:
        _spec = importlib.util.spec_from_file_location(
            f"storage_{_name}", Path(__file__).with_name(f"{_name}.py")
        )
        assert _spec is not None and _spec.loader is not None
        _module = importlib.util.module_from_spec(_spec)
        sys.modules[f"storage_{_name}"] = _module
        _spec.loader.exec_module(_module)

from storage_gate import PIECE, Gate, MakeLink  # noqa: E402  (loaded above)

MakeStore = Callable[..., PosixStore]


@pytest.fixture(params=["one directory", "two directories", "three directories", "memory", "buffered"])
def make_store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeStore]:
    """A maker of stores; each test runs over every kind. "buffered": the file system refuses direct I/O."""
    count = {"two directories": 2, "three directories": 3}.get(request.param, 1)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if request.param == "memory" else tmp_path) as base:
        parents = [Path(base, str(number)) for number in range(count)]
        for parent in parents:
            parent.mkdir()
        if request.param == "buffered":
            refuse_direct_io(monkeypatch)
        stores: list[PosixStore] = []

        def make(budget_bytes: int | None = None) -> PosixStore:
            stores.append(PosixStore(parents, budget_bytes=budget_bytes))
            return stores[-1]

        yield make
        for store in stores:
            store.close()
        assert all(not list(parent.iterdir()) for parent in parents)


@pytest.fixture
def store(make_store: MakeStore) -> PosixStore:
    return make_store()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def make_link(gate: Gate) -> Iterator[MakeLink]:
    """A maker of links whose every piece waits at the gate; closes them."""
    links: list[Link] = []

    def make(drives: int = 1, threads: int = 1, stuck_after_seconds: float = 30.0) -> Link:
        links.append(
            Link(
                "device->storage",
                gate.move,
                drives=range(drives),
                threads=threads,
                piece_bytes=PIECE,
                stuck_after_seconds=stuck_after_seconds,
            )
        )
        return links[-1]

    yield make
    gate.let()
    for link in links:
        link.close()
