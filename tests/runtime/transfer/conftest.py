"""Links whose chunks wait at a gate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runtime.transfer.link import Link

from .gate import CHUNK, Gate, MakeLink


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def make_link(gate: Gate) -> Iterator[MakeLink]:
    """Make links whose every chunk waits at the gate. They are closed at the end."""
    links: list[Link] = []

    def make(drives: int = 1, threads: int = 1, stuck_after_seconds: float = 30.0) -> Link:
        links.append(
            Link(
                "device->storage",
                gate.move,
                drives=range(drives),
                threads=threads,
                chunk_bytes=CHUNK,
                stuck_after_seconds=stuck_after_seconds,
                health_check_seconds=0.05,
            )
        )
        return links[-1]

    yield make
    gate.let()
    for link in links:
        link.close()
