"""One pair of ranks for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    pair = Ranks(tmp_path_factory.mktemp("ranks"))
    yield pair
    pair.close()
