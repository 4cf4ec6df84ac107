"""The pager over an in-memory mover: the budget, who leaves, prefetches, deaths and errors. Copies end when the test says so."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planner.errors import StorageError, StorageFullError, StorageIOError
from runtime.device import CpuDevice
from runtime.paging import Block, NullMover, Pager, State, Tier, slot_of, span_of, storage_of

from ..memory_mover import UNIT, Bench, QueueingMover, evicted, io_error


class Counting(CpuDevice):
    """A device that knows how much memory is allocated."""

    allocated_bytes = 0

    def external_bytes(self, known_bytes: int) -> int:
        return self.allocated_bytes - known_bytes


def test_what_was_there_before_it_was_seen_counts_once() -> None:
    device = Counting()
    pager = Pager(mover=None, budget_bytes=None, device=device)
    weight, batch, output = (torch.zeros(UNIT * number, dtype=torch.uint8) for number in (4, 2, 1))
    device.allocated_bytes = 10 * UNIT
    for _ in range(2):
        pager.enter_region()
        pager.block_of(weight, name="weight", kind="parameter", user_visible=True)
        pager.block_of(batch, name="batch", kind="activation", user_visible=True)
        assert (pager.account.used_bytes, pager.account.unmoved_bytes) == (6 * UNIT, 4 * UNIT)
        pager.leave_region()
    device.allocated_bytes += UNIT
    pager.block_of(output, name="output", kind="activation", user_visible=False)
    assert (pager.account.used_bytes, pager.account.unmoved_bytes) == (7 * UNIT, 4 * UNIT), "a stage's output is new"
    assert pager.account.peak_bytes <= device.allocated_bytes


@pytest.mark.parametrize(("uses", "leaves"), [((1, 9, 5), 1), ((100, 0, 5), 1), ((3, 2, 0), 2)])
def test_the_block_that_is_used_last_or_nobody_knows_when_leaves_and_no_other(uses: Sequence[int], leaves: int) -> None:
    bench = Bench(6 * UNIT)
    blocks = [bench.make(name, 2) for name in "abc"]
    for block, use in zip(blocks, uses, strict=True):
        block.next_use = use
    bench.make("new", 2)
    assert [number for number, block in enumerate(blocks) if block.state is State.OFFLOADED] == [leaves]


def test_copies_are_exposed_while_the_training_thread_waits_and_hidden_else() -> None:
    busy = {"out": 0.0, "in": 0.0}
    bench = Bench(4 * UNIT, busy_seconds=lambda: dict(busy))
    first = bench.make("first", 2)
    bench.make("second", 2)

    def copy_ends() -> bool:
        busy[bench.mover.flying[0].kind] += 3.0
        return Bench.finish_one(bench)

    bench.condition.finish_one = copy_ends
    evicted(bench, first)  # nobody waits
    assert bench.pager.account.exposed_seconds == {}
    bench.make("third", 2)
    assert bench.pager.account.exposed_seconds == {}, "there was room"
    bench.run(first)  # waits until another has left, and then until it is here
    assert bench.pager.account.exposed_seconds == {"out": 3.0, "in": 3.0}
    bench.pager.offload(first)
    busy["out"] += 5.0
    bench.mover.finish_all()
    assert bench.pager.account.exposed_seconds == {"out": 3.0, "in": 3.0}, "nobody waited for this one"


def test_no_mover_and_no_room() -> None:
    pager = Pager(mover=None, budget_bytes=4 * UNIT)
    pager.enter_region()
    with pytest.raises(StorageError, match="set the option storage to a directory"):
        pager.acquire([], 5 * UNIT, "big")


def test_what_has_no_place_to_go_to_or_to_be_says_so() -> None:
    mover: Any = NullMover()
    block = Block(held=torch.UntypedStorage(8), name="block", kind="activation", user_visible=False, span=None)  # nobody holds it
    for name, count in {"begin_in_file": 1, "copy_out": 3, "copy_in": 2, "release": 1, "install": 1}.items():
        with pytest.raises(StorageError, match="there is nowhere to move blocks to"):
            getattr(mover, name)(*[block] * count)
    with pytest.raises(StorageError, match="there is nowhere to move blocks to"):
        mover.copy_range(block, 0, torch.empty(8), to_slot=True)
    store: Any = SimpleNamespace(tier="host")
    for wanted in (span_of, slot_of, storage_of, mover.tiers.of, Tier(store=store, engine=None).threads):
        with pytest.raises(StorageError, match="this is a bug in teraio, please report it"):
            wanted(*[block] * (wanted.__name__ != "threads"))


def test_memory_that_is_kept_for_reuse_counts_as_well() -> None:
    bench = Bench(8 * UNIT)
    bench.pager.account.fixed_bytes = UNIT
    bench.make("kept", 4)
    bench.pager.acquire([], 2 * UNIT, "stage")
    assert bench.device.spare_bytes == 3 * UNIT, "what the stage allocates comes out of it"
    bench.pager.retire([], [])
    bench.drop("kept")
    bench.pager.leave_region()
    assert bench.device.spare_bytes == 7 * UNIT


def test_one_storage_is_one_block_until_it_is_resized_and_without_a_budget_nothing_moves() -> None:
    bench = Bench(None)
    block = bench.make("base", 64)
    view = bench.tensors["base"].view(64, UNIT)[1]
    assert bench.pager.block_of(view, name="view", kind="activation", user_visible=True) is block
    assert block.user_visible and bench.pager.account.used_bytes == 64 * UNIT
    bench.tensors["base"].untyped_storage().resize_(4 * UNIT)
    new = bench.pager.block_of(bench.tensors["base"], name="x", kind="activation", user_visible=False)
    assert new is not block and bench.pager.account.used_bytes == 4 * UNIT and bench.pager.blocks == [new]
    assert bench.pager.account.evictions == 0 and bench.pager.account.peak_bytes == 64 * UNIT


# -- prefetches


def test_what_user_code_may_have_written_after_a_region_that_ended_with_an_error_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Block) -> None:
        raise StorageError("gone")

    mover = QueueingMover()
    mover.device_copies = True
    bench = Bench(None, mover=mover)
    blocks = [bench.make(name, 2, visible=True, fill=3) for name in ("first", "second")]
    for block in blocks:
        bench.pager.offload(block)
    with monkeypatch.context() as patch, pytest.raises(StorageError, match="gone"):
        patch.setattr(mover, "release", refuse)
        bench.pager.leave_region()
    bench.tensors["second"].fill_(4)
    mover.device_copies = False
    bench.pager.enter_region()
    assert [(block.state, block.copy_is_valid) for block in blocks] == [(State.ON_DEVICE, False)] * 2
    assert (bench.value("first"), bench.value("second")) == (3, 4)


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
    ("moment", "error"), [("begins", StorageFullError("the drive is full")), ("begins", MemoryError()), ("ends", io_error())]
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


def test_whoever_waits_hears_of_a_dead_drive() -> None:
    bench = Bench(8 * UNIT)
    block = evicted(bench, bench.make("a", 4))
    bench.condition.silent = True
    bench.mover.stuck = io_error("a")
    with pytest.raises(StorageIOError, match="block 'a'"):
        bench.pager.acquire([block], 0, "run")
    assert block.pins == 0
    with pytest.raises(StorageIOError, match="block 'a'"):
        bench.pager.closing.bring_back()


def test_what_a_copy_fails_to_bring_back_stops_no_other() -> None:
    """What is still on its way when the end goes on would be lost with its slot."""
    bench = Bench(8 * UNIT)
    first, second = (evicted(bench, bench.make(name, 2, fill=fill)) for name, fill in (("first", 3), ("second", 5)))
    first.next_use, second.next_use = 1, 2
    bench.mover.fail_copies = [io_error("first")]
    with pytest.raises(StorageIOError, match="block 'first'"):
        bench.pager.closing.bring_back()
    assert (first.state, second.state, bench.mover.flying) == (State.OFFLOADED, State.ON_DEVICE, [])
    assert bench.value("second") == 5
    bench.pager.prefetch(first)
    assert bench.pager.closing.leave_behind() == 0 and first.state is State.ON_DEVICE
