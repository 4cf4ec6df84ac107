"""Links whose chunks wait at a gate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .gate import Gate, MakeLink, link_over


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def make_link(gate: Gate) -> Iterator[MakeLink]:
    """Make links whose every chunk waits at the gate. They are closed at the end."""
    links: list[Any] = []

    def make(drives: int = 1, threads: int = 1, stuck_after_seconds: float = 30.0) -> Any:
        links.append(link_over(gate.move, range(drives), threads, stuck_after_seconds))
        links[-1].health_check_seconds = 0.05
        return links[-1]

    yield make
    gate.let()
    for link in links:
        link.close()
