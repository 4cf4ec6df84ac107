"""The pager over an in-memory mover: blocks that die, copies that fail or cannot begin, drives that do not answer."""

from __future__ import annotations

import pytest

from planner.errors import StorageError, StorageFullError, StorageIOError
from runtime.paging import State

from ..memory_mover import UNIT, Bench, evicted, io_error

# -- death


@pytest.mark.parametrize("state", list(State))
def test_a_block_dies_in_every_state(state: State) -> None:
    bench = Bench(None)
    block = bench.make("w", 2)
    if state is State.UPDATING:
        bench.pager.lending.lend([block])
    elif state is State.DROPPED:
        block.source = "a stage"
        bench.pager.drop(block)
    elif state is not State.ON_DEVICE:
        bench.pager.offload(block)
    if state in (State.OFFLOADED, State.PREFETCHING):
        bench.mover.finish()
    if state is State.PREFETCHING:
        bench.pager.prefetch(block)
    assert block.state is state
    bench.drop("w")
    bench.pager.forget_dead()
    bench.mover.finish_all()
    if state is State.UPDATING:
        assert bench.mover.slots, "its slot is in use until it is given back"
        bench.pager.lending.give_back([block])
    bench.pager.forget_dead()
    assert bench.pager.account.used_bytes == 0 and not bench.pager.blocks and not bench.mover.slots


# -- errors


@pytest.mark.parametrize("way", ["out", "in"])
@pytest.mark.parametrize(
    ("moment", "error"),
    [("begins", StorageFullError("the drive is full")), ("begins", MemoryError()), ("ends", io_error())],
)
def test_an_error_of_a_copy_reaches_the_stage_that_waits_and_leaves_all_as_it_was(
    way: str, moment: str, error: Exception
) -> None:
    bench = Bench(4 * UNIT)
    block = bench.make("w", 4, fill=5)
    if way == "in":
        evicted(bench, block)
    wanted, new_bytes = ([block], 0) if way == "in" else ([], UNIT)
    before = block.state, bench.pager.account.used_bytes
    if moment == "begins":
        bench.mover.refuse = error
    else:
        bench.mover.fail_copies = [error]  # type: ignore[list-item]
    with pytest.raises(type(error)):
        bench.pager.acquire(wanted, new_bytes, "next")
    account = bench.pager.account
    assert (block.state, account.used_bytes) == before and not block.pins
    assert (account.reserved_bytes, account.offloading_bytes, account.prefetching_blocks) == (0, 0, 0)
    bench.pager.acquire(wanted, new_bytes, "next")
    assert block.state is (State.ON_DEVICE if way == "in" else State.OFFLOADED) and bench.value("w") == 5


@pytest.mark.parametrize("call", ["enter_region", "leave_region"])
def test_a_failed_prefetch_reaches_the_training_thread(call: str) -> None:
    bench = Bench(None)
    block = evicted(bench, bench.make("w", 2, fill=5))
    bench.pager.prefetch(block)
    bench.mover.fail_copies = [io_error()]
    bench.mover.finish()
    with pytest.raises(StorageIOError):
        getattr(bench.pager, call)()
    bench.pager.enter_region()
    bench.run(block)
    assert bench.value("w") == 5


def test_a_prefetch_that_can_not_begin_when_its_turn_comes() -> None:
    bench = Bench(4 * UNIT)
    block = evicted(bench, bench.make("w", 2, fill=5))
    blocker = bench.make("blocker", 4)
    bench.pager.prefetch(block)
    bench.pager.offload(blocker)
    bench.mover.refuse = StorageError("mmap failed")
    bench.mover.finish()  # an I/O thread would do this: nothing may be raised into it
    with pytest.raises(StorageError, match="mmap failed"):
        bench.pager.acquire([], UNIT, "next")
    bench.run(block)
    assert bench.value("w") == 5


def test_bringing_everything_back() -> None:
    bench = Bench(8 * UNIT)
    for number in range(8):
        bench.make(f"w{number}", 2, fill=number)
    bench.pager.offload(bench.pager.blocks[-1])
    bench.pager.bring_back_all()
    assert all(block.state is State.ON_DEVICE for block in bench.pager.blocks)
    assert [bench.value(f"w{number}") for number in range(8)] == list(range(8))
    assert bench.pager.account.used_bytes == 16 * UNIT


def test_whoever_waits_hears_of_a_dead_drive() -> None:
    bench = Bench(8 * UNIT)
    block = evicted(bench, bench.make("a", 4))
    bench.condition.silent = True
    bench.mover.stuck = io_error("a")
    with pytest.raises(StorageIOError, match="block 'a'"):
        bench.pager.acquire([block], 0, "run")
    assert block.pins == 0
    with pytest.raises(StorageIOError, match="block 'a'"):
        bench.pager.bring_back_all()
