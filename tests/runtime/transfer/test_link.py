"""The queue of one link: order, cancelling, promoting, errors, closing. A gate holds every chunk."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from planner.errors import StorageError, StorageIOError
from runtime.transfer.link import Transfer

from .gate import CHUNK, Gate, MakeLink, nothing, slot


def test_blocks_move_in_the_order_of_issue(make_link: MakeLink, gate: Gate) -> None:
    link = make_link()
    ended: list[str] = []
    transfers = [link.submit(slot(name), 0, lambda t: ended.append(t.slot.name)) for name in "abcde"]
    gate.let()
    for transfer in transfers:
        transfer.wait(30)
    assert gate.begun == ended == list("abcde")


def test_all_threads_work_on_the_first_block_and_then_go_on_to_the_next(make_link: MakeLink, gate: Gate) -> None:
    link = make_link(threads=3)
    first = link.submit(slot("first", 4 * CHUNK, extents=2), 0, nothing)  # two chunks
    second = link.submit(slot("second", 3 * CHUNK), 0, nothing)
    assert sorted(gate.wait_until_begun(3)) == ["first", "first", "second"]
    gate.let()
    second.wait(30)
    first.wait(30)
    assert gate.begun.count("second") == 3
    assert first.done and second.done


def test_what_has_not_begun_can_be_cancelled(make_link: MakeLink, gate: Gate) -> None:
    link = make_link()
    ended: list[str] = []
    one, two, three = (link.submit(slot(name), 0, lambda t: ended.append(t.slot.name)) for name in "abc")
    gate.wait_until_begun(1)
    assert two.cancel() and two.cancelled
    assert not two.cancel() and not two.promote()
    assert not one.cancel()  # has begun
    with pytest.raises(StorageError, match="b 4096 bytes cancelled> was cancelled before it began"):
        two.wait(30)
    gate.let()
    three.wait(30)
    assert not three.cancel() and not three.promote()
    assert gate.begun == ended == ["a", "c"]


def test_what_is_promoted_begins_next(make_link: MakeLink, gate: Gate) -> None:
    link = make_link()
    transfers = [link.submit(slot(name), 0, nothing) for name in "abcd"]
    gate.wait_until_begun(1)
    assert transfers[3].promote()
    assert transfers[2].promote()
    assert not transfers[0].promote()
    gate.let()
    for transfer in transfers:
        transfer.wait(30)
    assert gate.begun == ["a", "c", "d", "b"]


def test_an_error_reaches_the_callback_and_whoever_waits(make_link: MakeLink, gate: Gate) -> None:
    link = make_link()
    gate.errors["bad"] = StorageIOError(path="/nowhere", block="bad", errno=5)
    told: list[tuple[bool, object]] = []
    bad = link.submit(slot("bad", 5 * CHUNK), 0, lambda t: told.append((t.done, t.error)))
    good = link.submit(slot("good"), 0, nothing)
    gate.let()
    good.wait(30)  # the link still works
    for _ in range(2):
        with pytest.raises(StorageIOError) as raised:
            bad.wait(30)
        assert raised.value is gate.errors["bad"]
    assert told == [(True, gate.errors["bad"])]
    assert link.moved_bytes == CHUNK


def test_after_an_error_the_rest_of_the_block_is_left_out(make_link: MakeLink, gate: Gate) -> None:
    link = make_link(threads=2)
    gate.errors["bad"] = StorageIOError(path="/nowhere", block="bad", errno=5)
    told: list[Transfer] = []
    bad = link.submit(slot("bad", 12 * CHUNK, extents=6), 0, told.append)
    gate.wait_until_begun(2)
    gate.let()
    with pytest.raises(StorageIOError):
        bad.wait(30)
    assert told == [bad]
    assert len(gate.begun) <= 3  # a thread may take one more before it knows of the first error


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


def test_waiting_can_time_out(make_link: MakeLink, gate: Gate) -> None:
    transfer = make_link().submit(slot("slow"), 0, nothing)
    with pytest.raises(TimeoutError, match="slow 4096 bytes pending> has not ended after 0.01 seconds"):
        transfer.wait(0.01)
    assert not transfer.done and transfer.seconds == 0.0
    gate.let()
    transfer.wait(30)
    assert transfer.done and transfer.seconds > 0.0 and transfer.bytes == 4096


def test_closing_lets_everything_end_that_was_submitted(make_link: MakeLink, gate: Gate) -> None:
    link = make_link(threads=2)
    ended: list[str] = []
    for name in "abcdef":
        link.submit(slot(name), 0, lambda t: ended.append(t.slot.name))
    gate.wait_until_begun(2)
    closer = threading.Thread(target=link.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive() and ended == []
    gate.let()
    closer.join(30)
    assert sorted(ended) == list("abcdef")
    link.close()
    with pytest.raises(StorageError, match="is closed: block 'g' cannot move"):
        link.submit(slot("g"), 0, nothing)


def test_at_the_end_of_the_process_what_has_not_begun_is_dropped(make_link: MakeLink, gate: Gate) -> None:
    link = make_link()
    ended: list[str] = []
    begun, queued = (link.submit(slot(name), 0, lambda t: ended.append(t.slot.name)) for name in "ab")
    gate.wait_until_begun(1)
    link.close(drop_queued=True, timeout_seconds=0.01)  # does not wait forever for a transfer that cannot end
    gate.let()
    link.close()
    assert gate.begun == ended == ["a"]
    assert begun.done and not queued.done


def test_a_callback_may_submit_the_next_block(make_link: MakeLink, gate: Gate) -> None:
    link = make_link()
    gate.let()
    names = iter("bcd")
    finished = threading.Event()

    def again(transfer: Transfer) -> None:
        name = next(names, None)
        if name is None:
            finished.set()
        else:
            link.submit(slot(name), 0, again)

    link.submit(slot("a"), 0, again)
    assert finished.wait(30)
    assert gate.begun == list("abcd")


def test_counters(make_link: MakeLink, gate: Gate) -> None:
    link = make_link(threads=2)
    assert (link.moved_bytes, link.busy_seconds, link.bytes_per_second) == (0, 0.0, 0.0)
    transfers = [link.submit(slot(name, 3 * CHUNK), 0, nothing) for name in "ab"]
    gate.wait_until_begun(2)
    threading.Event().wait(0.02)
    assert link.busy_seconds >= 0.02 and link.moved_bytes == 0
    gate.let()
    for transfer in transfers:
        transfer.wait(30)
    assert link.moved_bytes == 6 * CHUNK
    busy = link.busy_seconds
    assert busy == link.busy_seconds <= 2 * max(t.seconds for t in transfers)
    assert link.bytes_per_second == link.moved_bytes / busy


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
    link = make_link(stuck_after_seconds=0.2)
    stuck = link.submit(slot("weights"), 0, nothing)
    behind = link.submit(slot("behind"), 0, nothing)
    gate.wait_until_begun(1)
    link.check()  # it has not been stuck for long enough
    with pytest.raises(StorageIOError, match=r"cannot write \(no answer in 0.2 s\) block 'weights' in ") as caught:
        stuck.wait()
    assert caught.value.errno == errno.ETIMEDOUT and caught.value.path == str(stuck.slot.extents[0].path)
    with pytest.raises(StorageIOError, match="no answer"):
        link.check()
    with pytest.raises(StorageIOError, match="no answer"):
        link.close()
    gate.let()
    stuck.wait(30)
    assert stuck.done and not behind.done, "the drive came back: its chunk ends, but nothing new begins"
    link.check()


def test_a_drive_that_is_only_slow_is_none(make_link: MakeLink, gate: Gate) -> None:
    link = make_link(stuck_after_seconds=30.0)
    slow = link.submit(slot("slow"), 0, nothing)
    gate.wait_until_begun(1)
    threading.Timer(0.2, gate.let).start()
    slow.wait()  # checks the drive several times
    link.close()
