"""A store whose reads and writes wait until the test lets them go, to look at queues at rest."""

from __future__ import annotations

import threading
from pathlib import Path

from runtime.storage.store import Extent, Piece, Slot


def slot(name: str, size_bytes: int = 4096, extents: int = 1) -> Slot:
    """A slot without a file."""
    length = size_bytes // extents
    parts = tuple(
        Extent(file_descriptor=-1, path=Path(f"/nowhere/{n}"), offset_bytes=0, length_bytes=length)
        for n in range(extents)
    )
    return Slot(name=name, size_bytes=size_bytes, extents=parts)


class Gate:
    """Moves nothing; notes what began, and holds every piece until it is let through."""

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}
        self.begun: list[str] = []
        self._changed = threading.Condition()
        self._free = 0

    def move(self, slot: Slot, piece: Piece, address: int) -> None:
        with self._changed:
            self.begun.append(slot.name)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._free > 0, timeout=30)
            self._free -= 1
        if slot.name in self.errors:
            raise self.errors[slot.name]

    def let(self, pieces: int = 1 << 30) -> None:
        """Let so many more pieces through."""
        with self._changed:
            self._free += pieces
            self._changed.notify_all()

    def wait_until_begun(self, pieces: int) -> list[str]:
        """Wait until so many pieces have begun in all; gives the names of their blocks in order."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= pieces, timeout=30)
            return list(self.begun)
