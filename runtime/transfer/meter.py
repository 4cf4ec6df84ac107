"""Counts what a link has moved and how long it was busy, and keeps the chunks that are moving now."""

from __future__ import annotations

import time

from runtime.storage import Chunk
from runtime.transfer.transfer import Transfer


class LinkMeter:
    """The counters of one link. Not thread-safe: the link's lock guards it.

    moved_bytes: of all chunks that have moved since the start.
    moving: the chunks that move now, and when each of them began, by `time.perf_counter`.
    """

    __slots__ = ("_busy_seconds", "_busy_since", "moved_bytes", "moving")

    def __init__(self) -> None:
        self.moved_bytes = 0
        self.moving: dict[tuple[Transfer, Chunk], float] = {}
        self._busy_since = 0.0
        self._busy_seconds = 0.0

    @property
    def busy_seconds(self) -> float:
        """Time during which at least one chunk was moving, until now."""
        since = time.perf_counter() - self._busy_since if self.moving else 0.0
        return self._busy_seconds + since

    def start(self, transfer: Transfer, chunk: Chunk) -> None:
        """Note that a chunk begins to move."""
        now = time.perf_counter()
        if not self.moving:
            self._busy_since = now
        if transfer.begun_at is None:
            transfer.begun_at = now
        self.moving[transfer, chunk] = now

    def stop(self, transfer: Transfer, chunk: Chunk, *, moved: bool) -> None:
        """Note that a chunk has moved; if not `moved`, it was there already, or it failed, perhaps before it began to move."""
        begun = self.moving.pop((transfer, chunk), None)
        if begun is None:
            return
        now = time.perf_counter()
        if not self.moving:
            self._busy_seconds += now - self._busy_since
        if moved:
            self.moved_bytes += chunk.length_bytes
        if transfer.begun_at is not None:
            transfer.seconds = now - transfer.begun_at
