"""A store in ordinary memory with slots of one size. The slot that was freed last is used first."""

from __future__ import annotations

import ctypes
from pathlib import Path

from planner.errors import StorageFullError
from planner.schema import WaitingTier
from runtime.storage import Extent, Slot


class Slab:
    """The part of `Store` that a mover needs if its device copies by itself."""

    def __init__(self, tier: WaitingTier, slots: int, slot_bytes: int) -> None:
        self.tier = tier
        self._memory = ctypes.create_string_buffer(slots * slot_bytes)
        self._free = list(range(0, slots * slot_bytes, slot_bytes))
        self._slot_bytes = slot_bytes
        self.limit_bytes = slots * slot_bytes
        self.used_bytes = 0

    def allocate(self, size_bytes: int, name: str) -> Slot:
        assert size_bytes <= self._slot_bytes
        if not self._free:
            raise StorageFullError("full")
        offset = self._free.pop()
        where = ctypes.addressof(self._memory) + offset
        extent = Extent(file_descriptor=-1, path=Path("slab"), offset_bytes=offset, length_bytes=self._slot_bytes, address=where)
        self.used_bytes += self._slot_bytes
        return Slot(
            name=name,
            size_bytes=self._slot_bytes,
            content_bytes=size_bytes,
            extents=(extent,),
        )

    def release(self, slot: Slot) -> None:
        self._free.append(slot.extents[0].offset_bytes)
        self.used_bytes -= self._slot_bytes
