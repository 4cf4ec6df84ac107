"""What teraio does to the process that it runs in: signals wait, the collector passes over much, profilers see names."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from runtime.system import (
    QuietCollector,
    all_objects,
    annotate,
    checkpoint,
    first_of,
    forget_undo,
    frozen,
    interruptible,
    storage_swap,
    undo_if_interrupted,
    uninterrupted,
)


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
    with uninterrupted():
        undo_if_interrupted(partial(undone.append, "earlier"))
    with pytest.raises(ValueError), uninterrupted():
        with uninterrupted():
            undo_if_interrupted(partial(undone.append, "inside"))
        raise ValueError
    assert undone == ["inside"]
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()
    assert undone == ["inside", "earlier"]
    with uninterrupted():
        pass


def test_a_handler_that_does_not_raise_is_called_and_what_runs_goes_on_and_signals_without_one_are_left_alone() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGUSR1)
            assert not heard and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
            checkpoint()
            assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_the_program_sets_inside_stays_and_what_it_sets_again_is_its_own() -> None:
    """What it gets for its handler is teraio's, which stands in for it."""
    with uninterrupted():
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.signal(signal.SIGINT, before) is signal.SIG_IGN
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()
    with uninterrupted():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_user_code_within_is_interrupted_at_once_and_what_follows_is_not() -> None:
    undone: list[str] = []
    with uninterrupted():
        undo_if_interrupted(partial(undone.append, "it"))
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


def test_what_is_forgotten_is_not_undone() -> None:
    undone: list[str] = []
    undo = partial(undone.append, "it")
    with uninterrupted():
        undo_if_interrupted(undo)
    with uninterrupted():
        forget_undo(undo)
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()
    assert not undone


# -- the garbage collector passes over what a training holds, and over nothing that is made later


class Loop:
    """An object that only the collector can free, once nobody has it."""

    def __init__(self) -> None:
        self.itself = self


def test_only_what_was_there_before_is_passed_over_and_garbage_is_collected_first(unfrozen: None) -> None:
    collector = QuietCollector()
    old, garbage = Loop(), weakref.ref(Loop())
    collector.begin()
    assert garbage() is None
    new = Loop()
    of_old, of_new = weakref.ref(old), weakref.ref(new)
    del old, new
    gc.collect()
    assert of_new() is None and of_old() is not None
    collector.end()
    gc.collect()
    assert of_old() is None and not frozen()


@pytest.mark.parametrize("decided", ["disabled", "frozen"])
def test_a_program_that_has_decided_itself_is_left_alone(decided: str, unfrozen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are noted, not objects counted: other threads, of trainings that tests have left, may search through all objects."""
    if decided == "disabled":
        gc.disable()
    else:
        gc.freeze()
    callers: list[int] = []
    with monkeypatch.context() as patch:
        for change in ("disable", "enable", "freeze", "unfreeze"):
            patch.setattr(gc, change, lambda: callers.append(threading.get_ident()))
        collector = QuietCollector()
        collector.begin()
        collector.end()
    gc.enable()
    assert threading.get_ident() not in callers


def test_a_search_sees_frozen_objects_and_takes_none_for_frozen(unfrozen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 counts 375 objects that nobody has frozen."""
    with monkeypatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", lambda: 375)
        old = Loop()
        assert any(each is old for each in all_objects(type(old))) and any(each is old for each in gc.get_objects())
        QuietCollector().begin()
    assert frozen() and not any(each is old for each in gc.get_objects())
    assert any(each is old for each in all_objects(type(old)))
    assert frozen() and not any(each is old for each in gc.get_objects())


# -- annotations for profilers


def test_a_profiler_sees_kinds_and_names_nested_as_they_ran() -> None:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        with annotate("stage", "forward/layers.3.attn"):
            with annotate("copy", "inner", "device->host"):
                torch.ones(3).sum()
        with pytest.raises(ValueError, match="of the stage"), annotate("stage", "one that fails"):
            raise ValueError("of the stage")
        with annotate("wait", lambda: "layers.3.attn.weight from storage"):
            pass
    attention, failing, wait = "stage forward/layers.3.attn", "stage one that fails", "wait layers.3.attn.weight from storage"
    seen = [event for event in profiled.events() if event.name.startswith("teraio::")]
    assert {each.name.removeprefix("teraio::"): each.cpu_parent and each.cpu_parent.name for each in seen} == {
        attention: None,
        "copy inner device->host": f"teraio::{attention}",
        failing: None,
        wait: None,
    }


def test_several_names_are_the_first_and_how_many_more() -> None:
    assert [first_of(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and 1 more", "a and 2 more"]


# -- native code: a quick look at many storages, which of them have other memory than they had


def test_storages_with_another_address_or_size_are_found() -> None:
    storages = [torch.zeros(8, dtype=torch.uint8).untyped_storage() for _ in range(5)]
    known = [[s._cdata for s in storages], [s.data_ptr() for s in storages], [s.nbytes() for s in storages]]
    assert storage_swap.changed(*known) == []
    storages[1].resize_(1 << 20)
    known[1][2], known[2][4] = known[1][0], 7
    storage_swap.discard(storages[3], "away")
    assert storage_swap.changed(*known) == [1, 2, 3, 4]
    known[1][3] = 0
    assert storage_swap.changed(*known) == [1, 2, 4] and storage_swap.changed([], [], []) == []
