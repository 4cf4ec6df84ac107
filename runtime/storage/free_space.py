"""The free bytes of a spill file: a list of holes. A hole is joined with its neighbours when a slot comes back."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from planner.errors import StorageError


class FreeSpace:
    """The holes of one file, in bytes. Not thread-safe: the store's lock guards it."""

    def __init__(self) -> None:
        self._offsets: list[int] = []
        self._lengths: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        """Sum of all holes."""
        return sum(self._lengths.values())

    @property
    def largest_bytes(self) -> int:
        """Length of the largest hole, 0 if there is none."""
        return max(self._lengths.values(), default=0)

    def tail_bytes(self, end: int) -> int:
        """Return the length of the hole that ends at `end`, 0 if there is none."""
        if not self._offsets:
            return 0
        last = self._offsets[-1]
        return self._lengths[last] if last + self._lengths[last] == end else 0

    def take(self, size_bytes: int) -> int | None:
        """Take `size_bytes` from the smallest hole that is large enough; of equal holes, from the one with the lowest offset.

        Return the offset, None if no hole is large enough.
        """
        fitting = [offset for offset in self._offsets if self._lengths[offset] >= size_bytes]
        if not fitting:
            return None
        offset = min(fitting, key=lambda candidate: self._lengths[candidate])
        self._shrink(offset, size_bytes)
        return offset

    def take_largest(self, max_bytes: int) -> tuple[int, int] | None:
        """Take up to `max_bytes` from the largest hole. Return offset and length, None if nothing is free."""
        if not self._offsets:
            return None
        offset = max(self._offsets, key=lambda candidate: self._lengths[candidate])
        length = min(self._lengths[offset], max_bytes)
        self._shrink(offset, length)
        return offset, length

    def give(self, offset: int, length_bytes: int) -> None:
        """Make a range free, which must be in use. Join it with the holes on both sides."""
        place = bisect_left(self._offsets, offset)
        if place < len(self._offsets) and self._offsets[place] == offset + length_bytes:
            length_bytes += self._lengths.pop(self._offsets.pop(place))
        if place > 0:
            before = self._offsets[place - 1]
            if before + self._lengths[before] == offset:
                self._lengths[before] += length_bytes
                return
        self._offsets.insert(place, offset)
        self._lengths[offset] = length_bytes

    def _shrink(self, offset: int, size_bytes: int) -> None:
        place = bisect_left(self._offsets, offset)
        left = self._lengths.pop(offset) - size_bytes
        if left:
            self._offsets[place] = offset + size_bytes
            self._lengths[offset + size_bytes] = left
        else:
            self._offsets.pop(place)


def take_largest_holes(spaces: Sequence[FreeSpace], size_bytes: int) -> list[tuple[int, int, int]]:
    """Take `size_bytes` from the largest holes of several files. The caller has checked that so many bytes are free.

    Return (index of the file, offset, length) of each hole, the largest first.
    """
    taken: list[tuple[int, int, int]] = []
    while size_bytes:
        index = max(range(len(spaces)), key=lambda candidate: spaces[candidate].largest_bytes)
        hole = spaces[index].take_largest(size_bytes)
        if hole is None:
            raise StorageError(f"{size_bytes} free bytes are missing; this is a bug in teraio, please report it")
        taken.append((index, *hole))
        size_bytes -= hole[1]
    return taken
