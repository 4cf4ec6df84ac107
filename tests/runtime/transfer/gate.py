"""A store whose chunks wait until the test releases them, so that tests can look at queues that do not change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from runtime.storage import Chunk, Extent, Slot
from runtime.transfer import Engine, Transfer

CHUNK = 4096


def nothing(transfer: Transfer) -> None:
    """An `on_done` for transfers that the test waits for."""


def slot(name: str, size_bytes: int = 4096, extents: int = 1, drives: tuple[int, ...] = (0,)) -> Slot:
    """Make a slot without a file. drives: its extents lie on them in turns."""
    length = size_bytes // extents
    parts = tuple(
        Extent(file_descriptor=-1, path=Path(f"/nowhere/{n}"), offset_bytes=0, length_bytes=length, drive=drives[n % len(drives)])
        for n in range(extents)
    )
    return Slot(name=name, size_bytes=size_bytes, content_bytes=size_bytes, extents=parts)


def striped(name: str, chunks: int = 2) -> Slot:
    """Make a slot with chunks on drives 0 and 1 in turns."""
    return slot(name, chunks * CHUNK, extents=chunks, drives=(0, 1))


def link_over(write: Callable[[Slot, Chunk, int], None], drives: Sequence[int], threads: int, stuck_after_seconds: float) -> Any:
    """Return the outward link of an engine over a store that has no bytes: `write` is called for each chunk."""

    class Store:
        tier = "storage"
        write_chunk = staticmethod(write)
        read_chunk = staticmethod(write)

    Store.drives = drives  # type: ignore[attr-defined]
    engine = Engine(Store(), threads=threads, chunk_bytes=CHUNK, stuck_after_seconds=stuck_after_seconds)  # type: ignore[arg-type]
    engine.read_link.close()
    return engine.write_link


class Gate:
    """Moves nothing. Records the chunks that began, and holds every chunk until the test releases it.

    begun: names of blocks, once for each of their chunks. begun_on: the same for one drive.
    """

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}
        self.begun: list[str] = []
        self._changed = threading.Condition()
        self._free = 0
        self._free_on: dict[int, int] = {}
        self._begun_on: dict[int, list[str]] = {}

    def move(self, slot: Slot, chunk: Chunk, address: int) -> None:
        with self._changed:
            drive = chunk.extent.drive
            self.begun.append(slot.name)
            self._begun_on.setdefault(drive, []).append(slot.name)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._free > 0 or self._free_on.get(drive, 0) > 0, timeout=30)
            if self._free_on.get(drive, 0):
                self._free_on[drive] -= 1
            else:
                self._free -= 1
        if slot.name in self.errors:
            raise self.errors[slot.name]

    def let(self, chunks: int = 1 << 30) -> None:
        """Release so many more chunks."""
        with self._changed:
            self._free += chunks
            self._changed.notify_all()

    def let_on(self, drive: int, chunks: int = 1 << 30) -> None:
        """Release so many more chunks of one drive."""
        with self._changed:
            self._free_on[drive] = self._free_on.get(drive, 0) + chunks
            self._changed.notify_all()

    def begun_on(self, drive: int) -> list[str]:
        """Return the block names of the chunks that have begun on one drive, in order."""
        with self._changed:
            return list(self._begun_on.get(drive, ()))

    def wait_until_begun(self, chunks: int) -> list[str]:
        """Wait until so many chunks have begun in all. Return the names of their blocks in order."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= chunks, timeout=30)
            return list(self.begun)
