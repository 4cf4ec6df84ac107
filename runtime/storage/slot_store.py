"""The base of all stores that allocate slots themselves: it knows which slots are in use."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

from planner.errors import StorageError
from runtime.storage.free_space import AllOrNothing, FreeSpace
from runtime.storage.store import Chunk, Extent, Slot, align_up


class SlotStore(ABC):
    """Keeps the set of slots in use, guarded by `_lock`. A subclass knows where their bytes lie, and copies them.

    A slot is taken or released completely or not at all, also if memory runs out meanwhile.

    tier: the name of the tier, for messages.
    """

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._lock = threading.Lock()
        self._closed = False
        self._in_use: set[Slot] = set()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def allocate(self, size_bytes: int, name: str) -> Slot:
        size = align_up(max(size_bytes, 1))
        with self._lock:
            self._check_open()
            used = self._used_bytes + size
            shares = self._make_room(size, name)
            with AllOrNothing(self._spaces()):
                extents = tuple(self._take_extents(shares))
                address = self._contiguous_address(extents)
                slot = Slot(name=name, size_bytes=size, content_bytes=size_bytes, extents=extents, address=address)
                self._in_use.add(slot)
            self._used_bytes = used
            return slot

    def release(self, slot: Slot) -> None:
        with self._lock:
            if self._closed:  # which released all slots
                return
            if slot not in self._in_use:
                raise StorageError(
                    f"the slot of block {slot.name!r} is not in use here; this is a bug in teraio, please report it"
                )
            used = self._used_bytes - slot.size_bytes
            with AllOrNothing(self._spaces()):
                for extent in slot.extents:
                    self._space_of(extent).give(extent.offset_bytes, extent.length_bytes)
                self._in_use.remove(slot)
            self._used_bytes = used

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._in_use.clear()
            self._used_bytes = 0
            self._free_everything()

    @abstractmethod
    def write_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None: ...

    @abstractmethod
    def read_chunk(self, slot: Slot, chunk: Chunk, address: int) -> None: ...

    @abstractmethod
    def _make_room(self, size_bytes: int, name: str) -> Sequence[int]:
        """Make sure that `size_bytes` (aligned) are free, and return how they should be divided over the spaces.

        name: of the block. Raises StorageFullError. The caller holds the lock.
        """

    @abstractmethod
    def _take_extents(self, shares: Sequence[int]) -> Sequence[Extent]:
        """Take extents that add up to what `_make_room` has returned: from each space its share, or from where room is.

        The caller holds the lock.
        """

    def _contiguous_address(self, extents: Sequence[Extent]) -> int | None:
        """Return where these extents begin in this process's memory; None if they are not there, or not in one piece."""
        return None

    @abstractmethod
    def _spaces(self) -> Sequence[FreeSpace]:
        """Return where slots can lie. The caller holds the lock."""

    @abstractmethod
    def _space_of(self, extent: Extent) -> FreeSpace:
        """Return where an extent lies. The caller holds the lock."""

    @abstractmethod
    def _free_everything(self) -> None:
        """Free the files or the memory. Called once. The caller holds the lock."""

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"the {self._tier} tier is closed; compile the model again to open a new one")
