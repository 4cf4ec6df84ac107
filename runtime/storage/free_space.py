"""Which parts of a spill file are free: holes, joined with their neighbours as slots come back."""

from __future__ import annotations

from bisect import bisect_left


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
        """Length of the hole that ends at `end`, 0 if there is none."""
        if not self._offsets:
            return 0
        last = self._offsets[-1]
        return self._lengths[last] if last + self._lengths[last] == end else 0

    def take(self, size_bytes: int) -> int | None:
        """Take `size_bytes` from the smallest hole that has room (best fit, then lowest). Gives the
        offset."""
        fitting = [offset for offset in self._offsets if self._lengths[offset] >= size_bytes]
        if not fitting:
            return None
        offset = min(fitting, key=lambda candidate: self._lengths[candidate])
        self._shrink(offset, size_bytes)
        return offset

    def take_largest(self, most_bytes: int) -> tuple[int, int] | None:
        """Take up to `most_bytes` from the largest hole. Gives offset and length, None if nothing is free."""
        if not self._offsets:
            return None
        offset = max(self._offsets, key=lambda candidate: self._lengths[candidate])
        length = min(self._lengths[offset], most_bytes)
        self._shrink(offset, length)
        return offset, length

    def give(self, offset: int, length_bytes: int) -> None:
        """Make a range free, which must not be so already; joins it with the holes on both sides."""
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
