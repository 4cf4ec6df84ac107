"""One link: order, promoting, errors, closing, over one drive and over several. A gate holds every chunk."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from planner.errors import StorageError, StorageIOError
from runtime.storage import Chunk, Slot
from runtime.transfer import Transfer

from .gate import CHUNK, Gate, link_over, nothing, slot, striped

BROKEN = StorageIOError(path="/nowhere", block="bad", errno=5)
MakeLink = Callable[..., Any]


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def make_link(gate: Gate) -> Iterator[MakeLink]:
    """Make links whose every chunk waits at the gate. They are closed at the end."""
    links: list[Any] = []

    def make(drives: int = 1, threads: int = 1, stuck_after_seconds: float = 30.0) -> Any:
        links.append(link_over(gate.move, range(drives), threads, stuck_after_seconds))
        links[-1].health_check_seconds = 0.05
        return links[-1]

    yield make
    gate.let()
    for link in links:
        link.close()


# -- order


def test_what_is_promoted_goes_first_on_the_drives_where_it_has_not_begun(make_link: MakeLink, gate: Gate) -> None:
    link = make_link(drives=2)
    transfers = {name: link.submit(striped(name), 0, nothing) for name in "abcd"}
    gate.wait_until_begun(2)
    gate.let_on(1, 2)
    gate.wait_until_begun(4)  # b and c have begun on drive 1, and a on both
    transfers["c"].promote()  # on drive 0
    transfers["d"].promote()  # on both
    transfers["a"].promote()  # on none
    gate.let()
    for transfer in transfers.values():
        transfer.wait(30)
    assert gate.begun_on(0) == ["a", "d", "c", "b"]
    assert gate.begun_on(1) == ["a", "b", "c", "d"]
    transfers["d"].promote()  # it has ended


@pytest.mark.parametrize(("drives", "threads", "expected"), [(3, 4, 12), (5, 4, 15), (20, 4, 20)])
def test_threads_are_bounded(make_link: MakeLink, drives: int, threads: int, expected: int) -> None:
    before = threading.active_count()
    link = make_link(drives=drives, threads=threads)
    assert link.thread_count == threading.active_count() - before == expected
    link.close()
    assert threading.active_count() == before


# -- errors


def test_an_error_where_chunks_move_on_the_other_drive_too(make_link: MakeLink, gate: Gate) -> None:
    link = make_link(drives=2)
    gate.errors["bad"] = BROKEN
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


def test_an_unexpected_exception_is_not_lost(make_link: MakeLink, gate: Gate) -> None:
    link = make_link()
    gate.errors["odd"] = ZeroDivisionError("by zero")
    odd = link.submit(slot("odd"), 0, nothing)
    gate.let()
    with pytest.raises(StorageError, match="ZeroDivisionError.*please report it") as raised:
        odd.wait(30)
    assert raised.value.__cause__ is gate.errors["odd"]
    link.submit(slot("next"), 0, nothing).wait(30)


def test_an_exception_in_the_callback_is_heard_three_times(
    make_link: MakeLink, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda details: heard.append(details.exc_value))
    link = make_link()
    gate.let()

    def fail(transfer: Transfer) -> None:
        raise KeyError("callback")

    transfer = link.submit(slot("a"), 0, fail)
    with pytest.raises(StorageError, match="what follows .* failed: KeyError"):
        transfer.wait(30)
    assert [type(error) for error in heard] == [KeyError]
    with pytest.raises(StorageError, match="KeyError"):
        link.submit(slot("b"), 0, nothing)
    link.submit(slot("c"), 0, nothing).wait(30)


# -- closing, and drives that do not answer


def test_at_the_end_of_the_process_what_has_not_begun_is_dropped(make_link: MakeLink, gate: Gate) -> None:
    link = make_link()
    ended: list[str] = []
    begun, queued = (link.submit(slot(name), 0, lambda t: ended.append(t.slot.name)) for name in "ab")
    gate.wait_until_begun(1)
    link.close(within_seconds=0.01)  # does not wait forever for a transfer that cannot end
    gate.let()
    link.close()
    assert gate.begun == ended == ["a"]
    assert begun.done and not queued.done


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_told_and_its_parent_goes_on(make_link: MakeLink, gate: Gate) -> None:
    link = make_link()
    waiting = link.submit(slot("a"), 0, nothing)
    gate.wait_until_begun(1)
    child = os.fork()
    if child == 0:  # a thread that the child does not have may hold the lock
        status = 43
        try:
            link.close()
            link.submit(slot("b"), 0, nothing)
        except StorageError as error:
            status = 42 if "forked child" in str(error) else 44
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    gate.let()
    waiting.wait(30)
    link.submit(slot("c"), 0, nothing).wait(30)


def test_a_drive_that_does_not_answer_is_an_error_and_no_hang(make_link: MakeLink, gate: Gate) -> None:
    link = make_link(drives=2, stuck_after_seconds=0.2)
    stuck = link.submit(striped("stuck"), 0, nothing)
    gate.wait_until_begun(2)
    link.check()  # it has not been stuck for long enough
    gate.let_on(0)
    link.submit(slot("healthy", drives=(0,)), 0, nothing).wait(30)
    behind = link.submit(slot("behind", drives=(1,)), 0, nothing)
    with pytest.raises(StorageIOError, match=r"cannot write \(no answer in 0.2 s\) block 'stuck' in ") as caught:
        stuck.wait()
    assert caught.value.errno == errno.ETIMEDOUT and caught.value.path == str(stuck.slot.extents[1].path)
    for call in (link.check, link.close):
        with pytest.raises(StorageIOError, match="no answer"):
            call()
    gate.let()
    stuck.wait(30)
    assert stuck.done and not behind.done, "the drive came back: its chunk ends, but nothing new begins"
    link.check()


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


# -- memory that is not ready


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
    closer = threading.Thread(target=link.close)  # waits for memory, too
    closer.start()
    closer.join(0.05)
    assert gate.begun == [] and not behind.done and closer.is_alive(), "the order stays"
    late.promote()
    fence.opened.set()
    closer.join(30)
    assert late.done and behind.done and late.error is None
    assert fence.calls == 6 and gate.begun_on(0) == ["late"] * 3 + ["behind"]


def test_waiting_for_memory_is_no_drives_fault_and_no_work(make_link: MakeLink, gate: Gate) -> None:
    link = make_link(drives=1, stuck_after_seconds=0.1)
    fence = Fence()
    transfer = link.submit(slot("late"), 0, nothing, fence)
    assert fence.reached.wait(30)
    with pytest.raises(TimeoutError, match="late 4096 bytes pending> has not ended after 0.3 seconds"):
        transfer.wait(0.3)
    link.check()
    assert link.busy_seconds == 0.0 and not transfer.done
    gate.let()
    fence.opened.set()
    transfer.wait(30)
    assert 0 < link.busy_seconds < 0.3
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
    assert told == [raised.value]
    assert gate.begun == ["good"] and link.moved_bytes == CHUNK
    if isinstance(error, StorageError):
        assert raised.value is error
    else:
        assert raised.value.__cause__ is error
        assert "illegal memory access" in str(raised.value) and "did not become ready" in str(raised.value)


def test_random_traffic() -> None:
    """Every transfer ends exactly once, with an error if one of its chunks failed."""
    draw = random.Random(0)
    lock = threading.Lock()
    moved: dict[str, list[int]] = {}
    ended: list[Transfer] = []

    def move(where: Slot, chunk: Chunk, address: int) -> None:
        if where.name.startswith("bad") and chunk.slot_offset_bytes == CHUNK:
            raise StorageIOError(path=str(chunk.extent.path), block=where.name, errno=5)
        with lock:
            moved.setdefault(where.name, []).append(chunk.slot_offset_bytes)

    link = link_over(move, range(3), threads=2, stuck_after_seconds=30.0)
    transfers: list[Transfer] = []
    for number in range(1000):
        chunks = draw.randint(2, 6)
        drives = tuple(draw.sample(range(3), draw.randint(1, 3)))
        name = f"{'bad' if draw.random() < 0.2 else 'good'} {number}"
        ready = (lambda: None) if draw.random() < 0.3 else None
        transfers.append(link.submit(slot(name, chunks * CHUNK, chunks, drives), 0, ended.append, ready))
        if draw.random() < 0.3:
            draw.choice(transfers).promote()
    link.close()
    assert len(ended) == len(set(ended)) and set(ended) == set(transfers)
    for transfer in transfers:
        places = sorted(moved.get(transfer.slot.name, []))
        whole = list(range(0, transfer.slot.size_bytes, CHUNK))
        if transfer.slot.name.startswith("good"):
            assert places == whole and transfer.error is None
        else:
            assert set(places) < set(whole) and isinstance(transfer.error, StorageIOError)
    assert link.moved_bytes == sum(map(len, moved.values())) * CHUNK
