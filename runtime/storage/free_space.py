"""The free bytes of a spill file: a list of holes. A hole is joined with its neighbours when a slot comes back."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from planner.errors import StorageError

_Hole = tuple[int, int]  # offset and length


class FreeSpace:
    """The holes of one file, in bytes. Not thread-safe: the store's lock guards it.

    Each change is one assignment: an error, such as memory that runs out, leaves everything as it was.

    size_bytes: of the file, with what is in use.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self._holes: tuple[_Hole, ...] = ()  # from the lowest offset to the highest

    @property
    def free_bytes(self) -> int:
        """Sum of all holes."""
        return sum([length for _, length in self._holes])

    @property
    def largest_bytes(self) -> int:
        """Length of the largest hole, 0 if there is none."""
        return max((length for _, length in self._holes), default=0)

    @property
    def tail_bytes(self) -> int:
        """Length of the hole at the end of the file, 0 if there is none."""
        offset, length = self._holes[-1] if self._holes else (0, 0)
        return length if offset + length == self.size_bytes else 0

    def grow(self, more_bytes: int) -> None:
        """The file has so many more bytes at its end, all free."""
        holes = self._with_hole(self.size_bytes, more_bytes)
        self._holes, self.size_bytes = holes, self.size_bytes + more_bytes

    def take(self, size_bytes: int) -> int | None:
        """Take `size_bytes` from the smallest hole that is large enough; of equal holes, from the one with the lowest offset.

        Return the offset, None if no hole is large enough.
        """
        fitting = [hole for hole in self._holes if hole[1] >= size_bytes]
        if not fitting:
            return None
        hole = min(fitting, key=_length)
        self._shrink(hole, size_bytes)
        return hole[0]

    def take_largest(self, max_bytes: int) -> tuple[int, int] | None:
        """Take up to `max_bytes` from the largest hole. Return offset and length, None if nothing is free."""
        if not self._holes:
            return None
        hole = max(self._holes, key=_length)
        taken = hole[0], min(hole[1], max_bytes)
        self._shrink(hole, taken[1])
        return taken

    def give(self, offset: int, length_bytes: int) -> None:
        """Make a range free, which must be in use. Join it with the holes on both sides."""
        self._holes = self._with_hole(offset, length_bytes)

    def _with_hole(self, offset: int, length: int) -> tuple[_Hole, ...]:
        begin = end = bisect_left(self._holes, (offset, 0))
        if end < len(self._holes) and self._holes[end][0] == offset + length:
            length += self._holes[end][1]
            end += 1
        if begin > 0 and sum(self._holes[begin - 1]) == offset:
            begin -= 1
            offset, length = self._holes[begin][0], length + self._holes[begin][1]
        return (*self._holes[:begin], (offset, length), *self._holes[end:])

    def _shrink(self, hole: _Hole, size_bytes: int) -> None:
        place = bisect_left(self._holes, hole)
        offset, left = hole[0] + size_bytes, hole[1] - size_bytes
        rest = [(offset, left)] if left else []
        self._holes = (*self._holes[:place], *rest, *self._holes[place + 1 :])


class AllOrNothing:
    """A context: if what is taken or given inside fails, all of it is put back. The spaces must not grow inside."""

    __slots__ = ("_before",)

    def __init__(self, spaces: Iterable[FreeSpace]) -> None:
        self._before = [(space, space._holes) for space in spaces]

    def __enter__(self) -> None:
        """Nothing has changed since it was made."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for space, holes in self._before:
                space._holes = holes


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


def _length(hole: _Hole) -> int:
    return hole[1]
