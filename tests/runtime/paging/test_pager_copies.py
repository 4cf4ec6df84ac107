"""The pager over an in-memory mover: contents that copies, writes and user code race for, and the order of prefetches."""

from __future__ import annotations

import itertools

import pytest

from runtime.paging import State

from ..memory_mover import UNIT, Bench, evicted

# -- writes and copies


def test_a_clean_block_is_dropped_without_a_copy() -> None:
    bench = Bench(None)
    block = evicted(bench, bench.make("w", 2, fill=7))
    bench.run(block)
    bench.pager.offload(block)
    assert block.state is State.OFFLOADED and bench.mover.log.count("out w") == 1
    assert bench.value("w") == 7


def test_a_stage_that_writes_makes_the_copy_invalid() -> None:
    bench = Bench(None)
    block = evicted(bench, bench.make("w", 2, fill=1))
    bench.pager.acquire([block], 0, "write")
    bench.tensors["w"].fill_(2)
    bench.pager.retire([block], [block])
    evicted(bench, block)
    assert bench.value("w") == 2 and bench.mover.log.count("out w") == 2


@pytest.mark.parametrize("ends", ["during the stage", "after the stage"])
def test_a_write_while_the_copy_out_is_under_way(ends: str) -> None:
    bench = Bench(None)
    block = bench.make("w", 2, fill=1)
    bench.pager.offload(block)
    bench.pager.acquire([block], 0, "write")
    bench.tensors["w"].fill_(2)
    if ends == "during the stage":
        bench.mover.finish()
    bench.pager.retire([block], [block])
    bench.mover.finish_all()
    assert block.state is State.ON_DEVICE and not block.copy_is_valid
    evicted(bench, block)
    assert bench.value("w") == 2


def test_a_read_while_the_copy_out_is_under_way_does_not_wait_for_it() -> None:
    bench = Bench(None)
    block = bench.make("w", 2)
    bench.pager.offload(block)
    bench.pager.acquire([block], 0, "read")
    assert block.state is State.OFFLOADING
    bench.mover.finish()
    assert block.state is State.ON_DEVICE and block.copy_is_valid
    bench.pager.retire([block], [])
    bench.pager.offload(block)
    assert block.state is State.OFFLOADED and bench.mover.log.count("out w") == 1


def test_leaving_a_region_waits_for_what_user_code_can_reach() -> None:
    bench = Bench(None)
    seen, hidden = bench.make("seen", 2, visible=True), bench.make("hidden", 2)
    bench.pager.offload(hidden)
    bench.pager.offload(seen)
    bench.pager.leave_region()
    assert seen.state is State.OFFLOADED
    assert [copy.block for copy in bench.mover.flying] in ([], [hidden])


@pytest.mark.parametrize("where", ["here", "away", "away, and asked for"])
def test_user_code_may_write_wherever_a_block_is(where: str) -> None:
    bench = Bench(None)
    block = evicted(bench, bench.make("w", 2, visible=True))
    if where == "here":
        bench.run(block)
        assert block.copy_is_valid
    bench.pager.leave_region()
    if where == "away, and asked for":
        bench.pager.prefetch(block)
        assert not bench.mover.flying, "not before the next region"
    bench.tensors["w"].fill_(9)
    bench.pager.enter_region()
    assert ("invalidate w" in bench.mover.log) == (where != "here")
    evicted(bench, block) if where == "here" else bench.run(block)
    assert bench.value("w") == 9


# -- prefetches


def test_prefetches_wait_for_room_in_order() -> None:
    bench = Bench(8 * UNIT)
    first, second, third = (bench.make(name, units) for name, units in (("first", 4), ("second", 2), ("third", 2)))
    for block in (first, second, third):
        evicted(bench, block)
    blocker = bench.make("blocker", 6)
    for block in (first, second, third):
        bench.pager.prefetch(block)
    assert not bench.mover.flying, "the second may not overtake the first, though it would fit"
    bench.pager.offload(blocker)
    bench.mover.finish()
    assert [copy.block for copy in bench.mover.flying] == [first, second, third]
    bench.mover.finish_all()
    assert bench.pager.account.used_bytes == 8 * UNIT == bench.pager.account.peak_bytes


def test_a_prefetch_does_not_take_the_room_of_the_running_stage() -> None:
    bench = Bench(4 * UNIT)
    block = evicted(bench, bench.make("w", 2))
    bench.pager.acquire([], 3 * UNIT, "stage", then_fetch=[block])
    assert not bench.mover.flying
    bench.pager.retire([], [])
    bench.run()
    bench.pager.prefetch(block)
    assert bench.mover.flying


def test_a_prefetch_of_a_block_that_is_leaving() -> None:
    bench = Bench(None)
    block = bench.make("w", 2, fill=3)
    bench.pager.offload(block)
    bench.pager.prefetch(block)
    bench.mover.finish()
    assert block.state is State.PREFETCHING
    bench.mover.finish()
    assert block.state is State.ON_DEVICE and bench.value("w") == 3


def test_a_stage_takes_over_the_prefetch_that_is_under_way() -> None:
    bench = Bench(None)
    block = evicted(bench, bench.make("w", 2))
    bench.pager.prefetch(block)
    bench.run(block)
    assert bench.mover.log.count("in w") == 1 and "prioritize w" in bench.mover.log


@pytest.mark.parametrize("end", ["dead", "resized"])
def test_blocks_that_are_gone_hold_nobody_up_in_the_queue(end: str) -> None:
    bench = Bench(4 * UNIT)
    gone, alive = evicted(bench, bench.make("gone", 2)), evicted(bench, bench.make("alive", 2))
    blocker = bench.make("blocker", 4)
    bench.pager.prefetch(gone)
    bench.pager.prefetch(alive)
    if end == "dead":
        bench.drop("gone")
    else:
        bench.tensors["gone"].untyped_storage().resize_(0)
        bench.pager.block_of(bench.tensors["gone"], name="gone", kind="activation", user_visible=False)
    evicted(bench, blocker)
    assert "in alive" in bench.mover.log and "in gone" not in bench.mover.log


def test_what_a_stage_waited_for_is_late() -> None:
    bench = Bench(8 * UNIT)
    late, punctual, unasked = (evicted(bench, bench.make(name, 2)) for name in ("late", "punctual", "unasked"))
    bench.pager.prefetch(punctual)
    bench.mover.finish_all()
    bench.pager.prefetch(late)
    assert bench.pager.take_late() == [] and bench.pager.account.waited_seconds == 0.0
    bench.run(punctual)
    assert bench.pager.take_late() == [] and bench.pager.account.waited_seconds == 0.0
    bench.run(punctual, late, unasked)
    ((block, seconds),) = bench.pager.take_late()
    assert block is late and seconds > 0.0 and bench.pager.account.waited_seconds > 0.0
    assert bench.pager.take_late() == []


def test_each_late_block_landed_when_it_did() -> None:
    ticks = itertools.count(1)
    bench = Bench(8 * UNIT, now_seconds=lambda: float(next(ticks)))
    first, second = (evicted(bench, bench.make(name, 2)) for name in ("first", "second"))
    bench.pager.prefetch(first)
    bench.pager.prefetch(second)
    bench.run(second, first)
    (one, two) = bench.pager.take_late()
    assert (one[0], two[0]) == (first, second) and one[1] < two[1]


def test_what_waited_for_room_or_for_its_own_copy_out_is_not_late() -> None:
    bench = Bench(4 * UNIT)
    cramped = evicted(bench, bench.make("cramped", 2))
    leaving, other = bench.make("leaving", 2), bench.make("other", 2)
    bench.pager.prefetch(cramped)
    bench.pager.offload(leaving)
    bench.pager.prefetch(leaving)
    bench.mover.finish()
    assert cramped.state is State.PREFETCHING
    bench.run(cramped)
    bench.pager.offload(other)
    bench.mover.finish_all()
    assert leaving.state is State.ON_DEVICE
    bench.pager.offload(cramped)
    bench.pager.prefetch(cramped)
    assert cramped.state is State.PREFETCHING, "a clean block is away at once, and its room is still there"
    bench.run(cramped)
    assert [block for block, _ in bench.pager.take_late()] == [cramped], "this time only for its link"
