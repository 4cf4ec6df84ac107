"""What profilers see of an annotation, and that nothing is made where none runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler import emit_itt, emit_nvtx
from torch.profiler import ProfilerActivity, profile

from runtime.system import annotate, first_of


def names(profiled: profile) -> list[str]:
    return [event.name for event in profiled.events() if event.name.startswith("teraio::")]


def recording(*, all_threads: bool = False) -> profile:
    return profile(activities=[ProfilerActivity.CPU], experimental_config=_ExperimentalConfig(profile_all_threads=all_threads))


def in_a_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_profiler_sees_kinds_and_names_nested_as_they_ran() -> None:
    with recording() as profiled:
        with annotate("stage", "forward/layers.3.attn"):
            with annotate("copy", "inner", "device->host"):
                torch.ones(3).sum()
        with pytest.raises(ValueError, match="of the stage"), annotate("stage", "one that fails"):
            raise ValueError("of the stage")
        with annotate("wait", lambda: "layers.3.attn.weight from storage"):
            pass
    attention, failing, wait = "stage forward/layers.3.attn", "stage one that fails", "wait layers.3.attn.weight from storage"
    parents = {each.name: each.cpu_parent and each.cpu_parent.name for each in profiled.events() if each.name in names(profiled)}
    assert {name.removeprefix("teraio::"): parent for name, parent in parents.items()} == {
        attention: None,
        "copy inner device->host": f"teraio::{attention}",
        failing: None,
        wait: None,
    }


def test_other_threads_are_recorded_if_the_profiler_is_told_to() -> None:
    def copy() -> None:
        with annotate("copy", "weight device->storage"):
            pass

    with recording() as one:
        in_a_thread(copy)
    with recording(all_threads=True) as every:
        in_a_thread(copy)
    assert (names(one), names(every)) == ([], ["teraio::copy weight device->storage"])


def test_without_a_profiler_nothing_is_made_or_formatted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> AbstractContextManager[object]:
        pytest.fail("no profiler runs")

    monkeypatch.setattr(torch.profiler, "record_function", fail)
    contexts = {annotate("stage", "one"), annotate("wait", "another"), annotate("copy", lambda: pytest.fail("formatted"))}
    assert len(contexts) == 1
    with contexts.pop():
        pass


@pytest.mark.parametrize("timeline", [recording, emit_itt, emit_nvtx])
def test_every_timeline_turns_it_on_until_it_has_stopped(
    monkeypatch: pytest.MonkeyPatch, timeline: Callable[[], AbstractContextManager[object]]
) -> None:
    """As far as can be seen without a GPU: PyTorch's part of NVTX is left out."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name in ("_enable_profiler", "_disable_profiler") if timeline is emit_nvtx else ():
        monkeypatch.setattr(torch.autograd.profiler, name, lambda *_: None)
    before = annotate("stage", "one")
    with timeline():
        assert annotate("stage", "one") is not before
    assert annotate("stage", "one") is before


def test_several_names_are_the_first_and_how_many_more() -> None:
    assert [first_of(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and 1 more", "a and 2 more"]
