"""What several tests of the runtime start from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.storage import PosixStore


@pytest.fixture(params=[1, 2])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PosixStore]:
    """An empty store over one directory, or over two."""
    parents = [tmp_path / str(number) for number in range(request.param)]
    for parent in parents:
        parent.mkdir()
    store = PosixStore(parents, budget_bytes=None)
    yield store
    store.close()
