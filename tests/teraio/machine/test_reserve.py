"""What of a GPU's budget is left to gaps, and when it grows."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from teraio.machine import Reserve

BUDGET = 1 << 30


@dataclass
class Counted:
    spare_bytes: int = BUDGET // 32
    reserved_bytes: int = 0
    retries: int = 5

    def describe_pools(self) -> str:
        return "user code: 7 bytes free"


def iterate(reserve: Reserve, allocator: Counted, *retries: int) -> list[bool]:
    grown = []
    for count in retries:
        allocator.retries += count
        grown.append(reserve.planned_iteration_ended())
    return grown


def test_no_retries_no_growth() -> None:
    allocator = Counted()
    assert not any(iterate(Reserve(allocator, BUDGET), allocator, 0, 0, 0, 0))
    assert allocator.spare_bytes == BUDGET // 32


def test_the_first_planned_iterations_do_not_count() -> None:
    allocator = Counted()
    reserve = Reserve(allocator, BUDGET)
    assert iterate(reserve, allocator, 3, 2, 0, 0) == [False] * 4
    assert iterate(reserve, allocator, 9) == [True]
    assert reserve.size_bytes == allocator.spare_bytes == BUDGET // 16
    reserve.begin()
    assert iterate(reserve, allocator, 7, 7, 7) == [False, False, True]


def test_it_stops_where_the_last_raise_has_not_helped_and_says_whose_memory_it_is(caplog: pytest.LogCaptureFixture) -> None:
    allocator = Counted()
    reserve = Reserve(allocator, BUDGET)
    assert iterate(reserve, allocator, 0, 0, 4, 3, 3, 1, 9) == [False, False, True, True, False, False, False]
    (record,) = caplog.records
    assert "3 times an iteration" in record.message and "user code: 7 bytes free" in record.message


def test_it_stops_at_a_quarter_of_the_budget() -> None:
    allocator = Counted()
    reserve = Reserve(allocator, BUDGET)
    grown = iterate(reserve, allocator, *range(40, 0, -1))
    assert sum(grown) == 3 and allocator.spare_bytes == BUDGET // 4


def test_a_large_reserve_is_never_lowered() -> None:
    allocator = Counted(spare_bytes=BUDGET // 3)
    assert not any(iterate(Reserve(allocator, BUDGET), allocator, 1, 1, 1, 1))
    assert allocator.spare_bytes == BUDGET // 3
