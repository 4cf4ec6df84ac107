"""The holes of a file, compared with a set of free pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.storage.free_space import AllOrNothing, FreeSpace


def test_the_smallest_hole_that_fits_is_taken() -> None:
    free = FreeSpace()
    for offset, length in ((0, 50), (100, 10), (200, 20), (300, 10)):
        free.give(offset, length)
    assert free.take(10) == 100
    assert free.take(11) == 200
    assert free.take(9) == 211
    assert free.take(60) is None
    assert free.take_largest(40) == (0, 40)
    assert free.take_largest(40) == (40, 10)


def test_neighbours_are_joined() -> None:
    free = FreeSpace()
    free.grow(40)
    assert free.take(40) == 0
    for offset in (0, 20, 10, 30):
        assert free.tail_bytes == 0
        free.give(offset, 10)
    assert free.largest_bytes == free.free_bytes == free.tail_bytes == free.size_bytes == 40
    free.grow(5)
    assert free.largest_bytes == free.tail_bytes == 45


def test_what_fails_leaves_nothing_taken() -> None:
    free, other = FreeSpace(), FreeSpace()
    free.grow(40)
    other.grow(30)
    assert other.take(30) == 0
    with pytest.raises(MemoryError), AllOrNothing([free, other]):
        assert free.take(10) == 0
        other.give(0, 10)
        raise MemoryError
    assert (free.free_bytes, other.free_bytes) == (40, 0)
    with AllOrNothing([free]):
        assert free.take(10) == 0
    assert free.free_bytes == 30


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.integers(0, 99)), max_size=60))
def test_it_agrees_with_a_set_of_pages(steps: list[tuple[int, bool, int]]) -> None:
    free, pages = FreeSpace(), set(range(40))
    free.give(0, 40)
    taken: list[tuple[int, int]] = []
    for size, gives_back, pick in steps:
        if gives_back and taken:
            offset, length = taken.pop(pick % len(taken))
            free.give(offset, length)
            pages.update(range(offset, offset + length))
        else:
            offset = free.take(size)
            places = [start for start in range(40) if set(range(start, start + size)) <= pages]
            assert (offset is None) == (not places)
            if offset is not None:
                assert offset in places
                pages.difference_update(range(offset, offset + size))
                taken.append((offset, size))
        assert free.free_bytes == len(pages)
        runs = "".join("x" if page in pages else " " for page in range(40)).split()
        assert free.largest_bytes == max(map(len, runs), default=0)
