"""A link over several drives: each drive has a queue and threads of its own, and none delays another."""

from __future__ import annotations

import random
import threading

import pytest

from planner.errors import StorageError, StorageIOError
from runtime.storage.store import Chunk, Slot
from runtime.transfer.link import MAX_THREADS, Link, Transfer

from .gate import CHUNK, Gate, MakeLink, nothing, slot


def striped(name: str, chunks: int = 2) -> Slot:
    """Make a slot with chunks on drives 0 and 1 in turns."""
    return slot(name, chunks * CHUNK, extents=chunks, drives=(0, 1))


@pytest.mark.parametrize("threads", [1, 4])
def test_a_blocked_drive_does_not_hold_up_the_other(make_link: MakeLink, gate: Gate, threads: int) -> None:
    link = make_link(drives=2, threads=threads)
    blocked = [link.submit(slot(f"blocked {n}", drives=(1,)), 0, nothing) for n in range(8)]
    healthy = [link.submit(slot(f"healthy {n}", drives=(0,)), 0, nothing) for n in range(8)]
    gate.let_on(0)
    for transfer in healthy:
        transfer.wait(30)
    assert not any(transfer.done for transfer in blocked)
    assert len(gate.begun_on(1)) <= threads
    gate.let_on(1)
    for transfer in blocked:
        transfer.wait(30)


def test_a_transfer_ends_when_its_chunks_on_all_drives_have(make_link: MakeLink, gate: Gate) -> None:
    link = make_link(drives=2)
    ended: list[str] = []
    both = link.submit(striped("both", 6), 0, lambda t: ended.append(t.slot.name))
    last = link.submit(slot("last", drives=(0,)), 0, lambda t: ended.append(t.slot.name))
    gate.let_on(0)
    last.wait(30)  # behind all chunks of the first on this drive
    assert ended == ["last"] and not both.done and link.moved_bytes == 4 * CHUNK
    gate.let_on(1)
    both.wait(30)
    assert ended == ["last", "both"] and link.moved_bytes == 7 * CHUNK


def test_the_order_on_each_drive_is_that_of_submission(make_link: MakeLink, gate: Gate) -> None:
    link = make_link(drives=2)
    transfers = [link.submit(striped(name), 0, nothing) for name in "abcde"]
    gate.let_on(1)
    gate.wait_until_begun(6)
    gate.let_on(0)
    for transfer in transfers:
        transfer.wait(30)
    assert gate.begun_on(0) == gate.begun_on(1) == list("abcde")


def test_what_is_promoted_goes_first_on_the_drives_where_it_has_not_begun(make_link: MakeLink, gate: Gate) -> None:
    link = make_link(drives=2)
    transfers = {name: link.submit(striped(name), 0, nothing) for name in "abcd"}
    gate.wait_until_begun(2)
    gate.let_on(1, 2)
    gate.wait_until_begun(4)  # b and c have begun on drive 1, and a on both
    assert transfers["c"].promote()  # on drive 0
    assert transfers["d"].promote()  # on both
    assert not transfers["a"].promote()
    gate.let()
    for transfer in transfers.values():
        transfer.wait(30)
    assert gate.begun_on(0) == ["a", "d", "c", "b"]
    assert gate.begun_on(1) == ["a", "b", "c", "d"]
    assert not transfers["d"].promote()


def test_what_has_begun_on_one_drive_is_not_cancelled(make_link: MakeLink, gate: Gate) -> None:
    link = make_link(drives=2)
    first = link.submit(slot("first", drives=(0,)), 0, nothing)
    second = link.submit(striped("second"), 0, nothing)  # begins on drive 1 at once
    third = link.submit(striped("third"), 0, nothing)
    gate.wait_until_begun(2)
    assert not second.cancel()
    assert third.cancel() and third.cancelled
    gate.let()
    first.wait(30)
    second.wait(30)
    assert gate.begun_on(0) == ["first", "second"] and gate.begun_on(1) == ["second"]


def test_after_an_error_on_one_drive_the_others_leave_the_rest_out(make_link: MakeLink, gate: Gate) -> None:
    link = make_link(drives=2)
    before = link.submit(slot("before", drives=(0,)), 0, nothing)
    gate.errors["bad"] = StorageIOError(path="/nowhere", block="bad", errno=5)
    bad = link.submit(striped("bad", 8), 0, nothing)
    after = link.submit(slot("after", drives=(0,)), 0, nothing)
    gate.wait_until_begun(2)
    gate.let_on(1)
    with pytest.raises(StorageIOError):
        bad.wait(30)  # although it has not begun on drive 0
    gate.let()
    after.wait(30)
    before.wait(30)
    assert gate.begun_on(0) == ["before", "after"] and gate.begun_on(1) == ["bad"]


def test_an_error_where_chunks_move_on_the_other_drive_too(make_link: MakeLink, gate: Gate) -> None:
    link = make_link(drives=2)
    gate.errors["bad"] = StorageIOError(path="/nowhere", block="bad", errno=5)
    told: list[Transfer] = []
    bad = link.submit(striped("bad", 8), 0, told.append)
    gate.wait_until_begun(2)
    gate.let_on(1, 1)
    threading.Event().wait(0.05)
    assert not bad.done, "its memory must live until the last chunk that moves has ended"
    gate.let_on(0, 1)
    with pytest.raises(StorageIOError):
        bad.wait(30)
    assert told == [bad] and gate.begun == ["bad", "bad"]


@pytest.mark.parametrize(("drives", "threads", "expected"), [(1, 4, 4), (3, 4, 12), (8, 4, 16), (5, 4, 15), (20, 4, 20)])
def test_threads_are_bounded(drives: int, threads: int, expected: int) -> None:
    before = threading.active_count()
    link = Link("x->y", Gate().move, drives=range(drives), threads=threads, chunk_bytes=CHUNK, stuck_after_seconds=30.0)
    assert link.thread_count == threading.active_count() - before == expected <= max(MAX_THREADS, drives)
    link.close()
    assert threading.active_count() == before


def test_a_drive_that_does_not_answer_is_named_and_the_others_end_first(make_link: MakeLink, gate: Gate) -> None:
    link = make_link(drives=2, stuck_after_seconds=0.2)
    stuck = link.submit(slot("stuck", 2 * CHUNK, extents=2, drives=(0, 1)), 0, nothing)
    gate.let_on(0)
    healthy = link.submit(slot("healthy", drives=(0,)), 0, nothing)
    healthy.wait(30)
    with pytest.raises(StorageIOError, match="no answer") as caught:
        stuck.wait()
    assert caught.value.path == str(stuck.slot.extents[1].path)
    with pytest.raises(StorageIOError, match="no answer"):
        link.close()
    gate.let()
    stuck.wait(30)


class Fence:
    """A `ready` that waits until the test opens it. It counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.opened = threading.Event()
        self.reached = threading.Event()

    def __call__(self) -> None:
        self.calls += 1
        self.reached.set()
        assert self.opened.wait(30)


def test_no_chunk_moves_before_its_memory_is_ready(make_link: MakeLink, gate: Gate) -> None:
    link = make_link(drives=2)
    gate.let()
    fence = Fence()
    late = link.submit(striped("late", 6), 0, nothing, fence)
    behind = link.submit(slot("behind", drives=(0,)), 0, nothing)
    assert fence.reached.wait(30)
    threading.Event().wait(0.05)
    assert gate.begun == [] and not behind.done, "the order stays"
    assert not late.cancel() and not late.promote()
    fence.opened.set()
    late.wait(30)
    behind.wait(30)
    assert fence.calls == 6 and gate.begun_on(0) == ["late"] * 3 + ["behind"]


def test_waiting_for_memory_is_no_drives_fault_and_no_work(make_link: MakeLink, gate: Gate) -> None:
    link = make_link(drives=1, stuck_after_seconds=0.1)
    fence = Fence()
    transfer = link.submit(slot("late"), 0, nothing, fence)
    assert fence.reached.wait(30)
    threading.Event().wait(0.3)
    link.check()
    assert link.busy_seconds == 0.0
    gate.let()
    fence.opened.set()
    transfer.wait(30)
    assert 0 < link.busy_seconds < 0.3 and transfer.seconds < 0.3
    assert link.moved_bytes == CHUNK


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal memory access"), StorageError("gone")])
def test_memory_that_never_gets_ready_fails_the_transfer(make_link: MakeLink, gate: Gate, error: Exception) -> None:
    link = make_link(drives=1)
    gate.let()

    def broken() -> None:
        raise error

    told: list[StorageError | None] = []
    bad = link.submit(slot("bad", 5 * CHUNK), 0, lambda t: told.append(t.error), broken)
    good = link.submit(slot("good"), 0, nothing)
    good.wait(30)
    with pytest.raises(StorageError) as raised:
        bad.wait(30)
    assert told == [raised.value] and bad.seconds == 0.0
    assert gate.begun == ["good"] and link.moved_bytes == CHUNK
    if isinstance(error, StorageError):
        assert raised.value is error
    else:
        assert raised.value.__cause__ is error
        assert "illegal memory access" in str(raised.value) and "did not become ready" in str(raised.value)


def test_closing_waits_for_memory_too(make_link: MakeLink, gate: Gate) -> None:
    link = make_link(drives=1)
    gate.let()
    fence = Fence()
    transfer = link.submit(slot("late"), 0, nothing, fence)
    assert fence.reached.wait(30)
    closer = threading.Thread(target=link.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    fence.opened.set()
    closer.join(30)
    assert transfer.done and transfer.error is None


def test_behind_a_drive_that_does_not_answer_nothing_begins_on_any(make_link: MakeLink, gate: Gate) -> None:
    """The store is closed next. A chunk that began later would be written through a closed descriptor."""
    link = make_link(drives=2, stuck_after_seconds=0.2)
    both = link.submit(striped("both", 8), 0, nothing)
    behind = link.submit(striped("behind"), 0, nothing)
    gate.wait_until_begun(2)
    with pytest.raises(StorageIOError, match="no answer"):
        link.close()
    gate.let()
    with pytest.raises(StorageError, match="both 32768 bytes .* was cut short: the link device->storage was closed"):
        both.wait(30)
    link.close()
    assert gate.begun == ["both", "both"] and not behind.done


def test_random_traffic() -> None:
    """Every transfer that was not cancelled ends exactly once, with an error if one of its chunks failed."""
    draw = random.Random(0)
    lock = threading.Lock()
    moved: dict[str, list[int]] = {}
    ended: list[Transfer] = []

    def move(where: Slot, chunk: Chunk, address: int) -> None:
        if where.name.startswith("bad") and chunk.slot_offset_bytes == CHUNK:
            raise StorageIOError(path=str(chunk.extent.path), block=where.name, errno=5)
        with lock:
            moved.setdefault(where.name, []).append(chunk.slot_offset_bytes)

    link = Link("x->y", move, drives=range(3), threads=2, chunk_bytes=CHUNK, stuck_after_seconds=30.0)
    transfers: list[Transfer] = []
    cancelled: set[Transfer] = set()
    for number in range(1500):
        chunks = draw.randint(2, 6)
        drives = tuple(draw.sample(range(3), draw.randint(1, 3)))
        name = f"{'bad' if draw.random() < 0.2 else 'good'} {number}"
        ready = (lambda: None) if draw.random() < 0.3 else None
        transfers.append(link.submit(slot(name, chunks * CHUNK, chunks, drives), 0, ended.append, ready))
        if draw.random() < 0.3:
            draw.choice(transfers).promote()
        if draw.random() < 0.1:
            candidate = draw.choice(transfers[-20:])
            if candidate.cancel():
                cancelled.add(candidate)
    link.close()
    assert cancelled and len(ended) == len(set(ended)) and set(ended) == set(transfers) - cancelled
    for transfer in transfers:
        places = sorted(moved.get(transfer.slot.name, []))
        whole = list(range(0, transfer.bytes, CHUNK))
        if transfer in cancelled:
            assert places == [] and not transfer.done
        elif transfer.slot.name.startswith("good"):
            assert places == whole and transfer.error is None
        else:
            assert set(places) < set(whole) and isinstance(transfer.error, StorageIOError)
    assert link.moved_bytes == sum(map(len, moved.values())) * CHUNK
    assert link._meter.moving == {}
