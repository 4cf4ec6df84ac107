"""What of a GPU's budget is left to gaps, and when it grows."""

from __future__ import annotations

from dataclasses import dataclass

from teraio.machine import Reserve

BUDGET = 1 << 30


@dataclass
class Counted:
    spare_bytes: int = BUDGET // 32
    reserved_bytes: int = 0
    retries: int = 5


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
    assert iterate(reserve, allocator, 1) == [True]
    assert reserve.size_bytes == allocator.spare_bytes == BUDGET // 16
    reserve.begin()
    assert iterate(reserve, allocator, 7, 7, 7) == [False, False, True]


def test_it_stops_at_a_quarter_of_the_budget() -> None:
    allocator = Counted()
    reserve = Reserve(allocator, BUDGET)
    grown = iterate(reserve, allocator, *[1] * 40)
    assert sum(grown) == 7 and allocator.spare_bytes == BUDGET // 4


def test_a_large_reserve_is_never_lowered() -> None:
    allocator = Counted(spare_bytes=BUDGET // 3)
    assert not any(iterate(Reserve(allocator, BUDGET), allocator, 1, 1, 1, 1))
    assert allocator.spare_bytes == BUDGET // 3
