"""Signals wait while teraio changes its state, and the program's handlers come back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from runtime.system import checkpoint, forget_undo, interruptible, undo_if_interrupted, uninterrupted


@pytest.fixture(autouse=True)
def ctrl_c_raises() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_a_signal_waits_for_the_end_or_a_checkpoint() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            with uninterrupted():
                press_ctrl_c()
                press_ctrl_c()
                done.append("inner")
            done.append("outer")
    assert done == ["inner", "outer"]
    with uninterrupted():
        checkpoint()
        press_ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            checkpoint()
        checkpoint()  # it came once


def test_an_error_inside_does_not_lose_the_signal() -> None:
    with pytest.raises(KeyboardInterrupt) as raised:
        with uninterrupted():
            press_ctrl_c()
            raise ValueError
    assert isinstance(raised.value.__context__, ValueError)


def test_an_error_inside_undoes_what_was_begun_inside() -> None:
    """And not what an earlier section has begun, whose later hook may still come."""
    undone: list[str] = []

    def earlier() -> None:
        undone.append("earlier")

    def inside() -> None:
        undone.append("inside")

    with uninterrupted():
        undo_if_interrupted(earlier)
    with pytest.raises(ValueError), uninterrupted():
        with uninterrupted():
            undo_if_interrupted(inside)
        raise ValueError
    assert undone == ["inside"]
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()
    assert undone == ["inside", "earlier"]
    with uninterrupted():
        pass


def test_a_handler_that_does_not_raise_is_called_and_what_runs_goes_on() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGUSR1)
            assert not heard
            checkpoint()
            assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signals_without_a_handler_in_python_are_left_alone() -> None:
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    with uninterrupted():
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_a_handler_that_the_program_sets_inside_stays() -> None:
    with uninterrupted():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_handler_that_the_program_replaces_inside_and_sets_again_is_its_own() -> None:
    """What it gets for its handler is teraio's, which stands in for it."""
    with uninterrupted():
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGINT, before)
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()
    with uninterrupted():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_user_code_within_is_interrupted_at_once_and_what_follows_is_not() -> None:
    undone: list[str] = []

    def undo() -> None:
        undone.append("it")

    with uninterrupted():
        undo_if_interrupted(undo)
    done = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            with pytest.raises(KeyboardInterrupt), interruptible():
                with uninterrupted():
                    done.append("nested")
                press_ctrl_c()
                done.append("never")
            assert undone == ["it"]
            with interruptible():
                assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            press_ctrl_c()
            done.append("after")
    assert done == ["nested", "after"]


def test_other_threads_change_nothing() -> None:
    seen = []

    def work() -> None:
        with uninterrupted():
            checkpoint()
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_what_a_hook_leaves_is_undone_if_the_program_is_interrupted_after_it() -> None:
    undone: list[str] = []

    def undo() -> None:
        undone.append("it")

    with uninterrupted():
        undo_if_interrupted(undo)
    assert not undone
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()
    assert undone == ["it"]
    with uninterrupted():
        undo_if_interrupted(undo)
    with uninterrupted():
        forget_undo(undo)
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()
    assert undone == ["it"]


def test_what_has_failed_is_undone_once() -> None:
    undone: list[str] = []
    with pytest.raises(ValueError, match="failed"):
        with uninterrupted():
            undo_if_interrupted(lambda: undone.append("it"))
            raise ValueError("failed")
    assert undone == ["it"]
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()
    assert undone == ["it"]
