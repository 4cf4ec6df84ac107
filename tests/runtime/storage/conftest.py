"""Stores in files of every kind, for the tests of stores in files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.storage.posix import PosixStore

from ..direct_io import refuse_direct_io

MakeStore = Callable[..., PosixStore]


@pytest.fixture(params=["one directory", "two directories", "three directories", "memory", "buffered"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStore]:
    """Make stores. Each test runs over every kind. "buffered": the file system refuses direct I/O."""
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
