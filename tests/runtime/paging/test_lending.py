"""Blocks that are lent stay away until they are given back. Blocks are dropped where copies would take longer."""

from __future__ import annotations

import ctypes

import pytest
import torch

from planner.errors import StorageError, StorageIOError
from runtime.paging import Block, State
from runtime.storage import Slot

from ..memory_mover import UNIT, Bench, Deadlock, evicted, io_error

SIZE = 2 * UNIT


def change(bench: Bench, block: Block, value: int) -> None:
    """Add `value` to the block in its slot, in two ranges."""
    for begin in (0, UNIT):
        part = torch.zeros(UNIT, dtype=torch.uint8)
        bench.pager.lending.copy_range(block, begin, part, to_slot=False).wait()
        part += value
        bench.pager.lending.copy_range(block, begin, part, to_slot=True).wait()


@pytest.mark.parametrize("where", ["away", "on the device"])
def test_a_block_is_changed_where_it_waits_and_leaves_again_with_its_present_content(where: str) -> None:
    bench = Bench(4 * UNIT)
    block = bench.make("w", 2, fill=3)
    if where == "away":
        evicted(bench, block)
    bench.mover.log.clear()
    bench.pager.lending.lend([block])
    assert block.state is State.UPDATING and bench.pager.account.used_bytes == 0
    before = block.version, block.updates
    change(bench, block, 4)
    bench.pager.lending.give_back([block])
    assert (block.version, block.updates) == (before[0] + 1, before[1] + 1)
    leaves_first = ["out w"] * (where == "on the device")
    assert block.state is State.OFFLOADED and bench.mover.log == [*leaves_first, "invalidate w"], "no other copy of the whole"
    bench.run(block)
    assert bench.value("w") == 7
    bench.mover.log.clear()
    evicted(bench, block)
    assert bench.mover.log == [] and bench.value("w") == 7, "its slot has its present content"


@pytest.mark.parametrize("way", ["in", "out"])
def test_one_that_is_on_its_way(way: str) -> None:
    bench = Bench(4 * UNIT)
    block = bench.make("w", 2)
    if way == "in":
        evicted(bench, block)
        bench.pager.prefetch(block)
    else:
        bench.pager.offload(block)
    assert bench.mover.flying
    bench.pager.lending.lend([block])
    assert block.state is State.UPDATING and not bench.mover.flying and bench.pager.account.used_bytes == 0
    bench.pager.lending.give_back([block])
    bench.run(block)


def test_hints_wait_and_nobody_fetches_or_evicts() -> None:
    bench = Bench(4 * UNIT)
    lent, other, last = (evicted(bench, bench.make(name, 2)) for name in ("lent", "other", "last"))
    bench.make("a", 2)
    full = bench.make("b", 2)
    bench.pager.prefetch(lent)  # for which there is no room yet
    bench.pager.lending.lend([lent])
    bench.mover.log.clear()
    bench.pager.prefetch(lent)
    bench.pager.prefetch(other)
    bench.pager.offload(lent)
    bench.pager.offload(full)
    bench.mover.finish_all()
    bench.run(last)
    assert other.state is State.OFFLOADED, "hints keep their order"
    assert lent.state is State.UPDATING and not any(entry.endswith(" lent") for entry in bench.mover.log)
    bench.pager.lending.give_back([lent])
    bench.run(lent)


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


def test_what_is_lent_stays_where_it_is_and_comes_back_as_it_was_written() -> None:
    bench = Bench(8 * UNIT)
    block = evicted(bench, bench.make("w", 2, visible=True, fill=3))
    (address,) = bench.pager.lending.lend_memory([block]) or [0]
    bench.pager.prefetch(block)
    assert block.state is State.UPDATING and not bench.mover.flying, "nobody fetches it meanwhile"
    assert ctypes.string_at(address, block.size_bytes) == b"\3" * block.size_bytes
    ctypes.memset(address, 4, block.size_bytes)
    version = block.version
    bench.pager.lending.give_back([block])
    assert block.state is State.PREFETCHING and block.version > version and "invalidate w" in bench.mover.log
    bench.run(block)
    assert bench.value("w") == 4


def test_a_copy_out_that_is_under_way_lands_before_its_block_is_lent() -> None:
    bench = Bench(8 * UNIT)
    block = bench.make("w", 2)
    bench.pager.offload(block)
    assert block.state is State.OFFLOADING and bench.pager.lending.reserve_for_host([block])
    assert bench.pager.lending.lend_memory([block]) is not None
    bench.pager.lending.give_back([block])


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


def test_void_copies_go_where_room_is_wanted() -> None:
    bench = Bench(8 * UNIT)
    void, valid, away, below = (evicted(bench, bench.make(name, 2)) for name in ("void", "valid", "away", "below"))
    for block in (void, valid, below):
        bench.pager.acquire([block], 0, "x")
        bench.pager.retire([block], [block] if block is not valid else [])
        block.slot = Slot(name=block.name, size_bytes=2 * UNIT, content_bytes=2 * UNIT, extents=())
    below.tier = "storage"
    bench.pager.drop_void_copies("host")
    assert [line for line in bench.mover.log if line.startswith("drop")] == ["drop void"]
    bench.run(away, valid)


def test_a_stage_takes_what_is_set_aside() -> None:
    bench = Bench(8 * UNIT)
    block = evicted(bench, bench.make("w", 2))
    assert bench.pager.lending.reserve_for_host([block])
    bench.run(block)
    assert bench.pager.lending.lend_memory([block]) is None


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
