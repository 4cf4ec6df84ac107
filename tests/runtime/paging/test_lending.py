"""Blocks that are lent stay away until they are given back: what is not lent, and who waits. Their bytes: the movers' tests."""

from __future__ import annotations

import pytest

from planner.errors import StorageError, StorageIOError
from runtime.paging import State

from ..memory_mover import UNIT, Bench, Deadlock, evicted, io_error


def test_a_region_does_not_end_while_one_is_lent() -> None:
    """User code could change what is being updated."""
    bench = Bench(None)
    block = evicted(bench, bench.make("w", 2, visible=True))
    bench.pager.lending.lend([block])
    with pytest.raises(Deadlock):
        bench.pager.leave_region()
    bench.pager.lending.give_back([block])
    bench.pager.leave_region()


def test_one_whose_copy_fails_is_not_lent() -> None:
    bench = Bench(None)
    first, second = evicted(bench, bench.make("a", 2)), bench.make("b", 2)
    bench.mover.fail_copies = [io_error("b")]
    with pytest.raises(StorageIOError, match="'b'"):
        bench.pager.lending.lend([first, second])
    assert first.state is State.OFFLOADED and second.state is State.ON_DEVICE
    bench.pager.lending.lend([first, second])
    bench.pager.lending.give_back([first, second])


def test_one_that_cannot_leave_is_not_lent() -> None:
    bench = Bench(None)
    stuck = bench.make("odd", 3)
    with pytest.raises(StorageError, match="odd .* cannot leave, so that it cannot be lent"):
        bench.pager.lending.lend([stuck])


# -- to the processor, in the host tier


def test_what_is_not_in_the_host_tier_is_not_lent() -> None:
    bench = Bench(8 * UNIT)
    away, here = evicted(bench, bench.make("away", 2)), bench.make("here", 2)
    assert not bench.pager.lending.reserve_for_host([away, here])
    assert bench.pager.lending.lend_memory([away, here]) is None
    assert away.state is State.OFFLOADED and here.state is State.ON_DEVICE
    away.tier = "storage"
    assert not bench.pager.lending.reserve_for_host([away]) and bench.pager.lending.lend_memory([away]) is None
    bench.run(away, here)


@pytest.mark.parametrize("state", [State.OFFLOADED, State.OFFLOADING])
@pytest.mark.parametrize("then", ["lent", "given back", "not lent"])
def test_what_is_set_aside_is_not_fetched_before_it_is_lent(state: State, then: str) -> None:
    bench = Bench(8 * UNIT)
    block, after = bench.make("w", 2), evicted(bench, bench.make("after", 2))
    bench.pager.offload(block)
    if state is State.OFFLOADED:
        bench.mover.finish_all()
    assert block.state is state and bench.pager.lending.reserve_for_host([block])
    bench.pager.prefetch(block)
    bench.pager.prefetch(after)
    bench.mover.finish_all()
    assert block.state is State.OFFLOADED and after.state is State.OFFLOADED, "one waits for it, the other one for its turn"
    if then == "lent":
        assert bench.pager.lending.lend_memory([block]) is not None and after.state is State.OFFLOADED
        bench.pager.lending.give_back([block])
    elif then == "given back":
        bench.pager.lending.give_back([block])
    else:
        assert bench.pager.lending.lend_memory([block, bench.make("here", 2)]) is None
    bench.mover.finish_all()
    assert block.state is after.state is State.ON_DEVICE
    assert not bench.pager.account.reserved_for_host


@pytest.mark.parametrize("who", ["stage", "leave region", "bring back"])
def test_who_needs_what_is_lent_waits_for_it(who: str) -> None:
    bench = Bench(8 * UNIT)
    block = evicted(bench, bench.make("w", 2, visible=True))
    assert bench.pager.lending.lend_memory([block]) is not None
    waits = []

    def give_back() -> bool:
        waits.append(block.state)
        if block.state is State.UPDATING:
            bench.pager.lending.give_back([block])
        elif bench.mover.flying:
            bench.mover.finish()
        return True

    bench.condition.finish_one = give_back
    if who == "stage":
        bench.run(block)
    elif who == "leave region":
        bench.pager.leave_region()
        assert block.state is State.OFFLOADED
    else:
        bench.pager.closing.bring_back()
    assert waits[0] is State.UPDATING
