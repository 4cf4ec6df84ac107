"""What a real training under a budget tells: teraio's data, and what torch.profiler shows of it."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

import teraio

from ..training import MIB, Training, random_rows, weights_of_1_mib

STEPS = 4


def stepping(training: Training) -> Callable[..., None]:
    return lambda batch=None, index=0: training.mean_square_step(torch.randn(16, 512) if batch is None else batch)


Watch = Callable[[Callable[[teraio.IterationStats], object]], None]


@pytest.fixture
def watch() -> Iterator[Watch]:
    """`teraio.on_iteration` until the end of the test."""
    ends: list[Callable[[], None]] = []
    yield lambda watcher: ends.append(teraio.on_iteration(watcher))
    for end in ends * 2:  # nobody is taken away twice
        end()


def test_what_is_watched_agrees(tmp_path: Path, quick_links: None, watch: Watch) -> None:
    """With teraio's status."""
    told: list[teraio.IterationStats] = []
    watch(told.append)
    watch(lambda stats: None)
    options = {"memory_budget": 11 * MIB, "storage": tmp_path, "profile_iterations": 9}
    training = weights_of_1_mib(options, count=8, momentum=0.9)
    training.run(random_rows(STEPS), stepping(training))
    assert [each.iteration for each in told] == list(range(STEPS))
    (status,) = training.progress[-1]
    assert status.iterations == STEPS and {each.phase for each in told} == {"profile"}
    for link, moved in status.moved_bytes.items():
        assert sum(each.moved_bytes[link] for each in told) <= moved, "copies may go on between two iterations"
    last = told[-1]
    assert last.seconds > last.waited_seconds >= 0.0 and last.predicted_seconds is None
    assert 0 < last.tier_bytes["device"] <= 11 * MIB and last.tier_bytes["storage"] > 0
    assert sum(last.tier_bytes.values()) >= 8 * MIB
    assert last.moved_bytes["device->storage"] > 0 and last.bytes_per_second("storage->device")
    training.finish()


def test_what_a_watcher_raises_the_loop_raises(watch: Watch) -> None:
    def fail(stats: teraio.IterationStats) -> None:
        raise KeyError("mine")

    watch(fail)
    training = weights_of_1_mib({}, count=1)
    with pytest.raises(KeyError, match="mine"):
        stepping(training)()
    training.finish()


def test_a_watcher_is_interrupted_at_once_and_may_replace_handlers(tmp_path: Path, watch: Watch) -> None:
    training = weights_of_1_mib({"memory_budget": 11 * MIB, "storage": tmp_path}, count=8, momentum=0.9)
    done = []

    def interrupt(stats: teraio.IterationStats) -> None:
        if stats.iteration == 1:
            signal.signal(signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_IGN))
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if stats.iteration == 2:
            signal.raise_signal(signal.SIGINT)
        done.append(stats.iteration)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    watch(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            training.run(random_rows(4), stepping(training))
        assert done == [0, 1] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        training.run(random_rows(2), stepping(training))
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == [0, 1, 3, 4]
    training.finish()


# -- torch.profiler


def profiled(step: Callable[[], None]) -> list[str]:
    """The names that teraio gives to what runs in one step, in any thread."""
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as found:
        step()
    return [event.name for event in found.events() if event.name.startswith("teraio::")]


def test_stages_updates_waits_and_copies_have_names_while_a_profiler_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a training of 24 weights of 1 MiB, and as many momenta."""
    made: list[str] = []

    class Noted(torch.profiler.record_function):
        def __init__(self, name: str, args: str | None = None) -> None:
            made.append(name)
            super().__init__(name, args)

    monkeypatch.setattr(torch.profiler, "record_function", Noted)
    step = stepping(weights_of_1_mib({"memory_budget": 16 * MIB, "storage": tmp_path}, momentum=0.9))
    for _ in range(2):
        step()
    assert made == []
    names = profiled(step)
    for pattern in (
        r"teraio::stage forward/\S+",
        r"teraio::stage backward/\S+",
        r"teraio::update optimizer/subgroup\.\d+",
        r"teraio::wait \S+ (and \d+ more )?from storage",
        r"teraio::copy \d+\.weight device->storage",
        r"teraio::copy \d+\.weight storage->device",
    ):
        assert any(re.fullmatch(pattern, name) for name in names), (pattern, sorted(set(names)))
    assert sum(name.startswith("teraio::stage") for name in names) == teraio.status()[0].stages
    assert any(name.startswith("teraio::wait") for name in made)


def test_where_everything_fits_stages_have_names_and_iterations_are_told() -> None:
    """Also where all parameters get other memory, as by `PostLocalSGDOptimizer`: graphs make no blocks of it then."""
    training = weights_of_1_mib({"profile_iterations": 1}, count=2)
    training.run(random_rows(4), stepping(training))
    assert training.progress[-1][0].phase == "fits"
    names = profiled(stepping(training))
    assert {name.partition("/")[0] for name in names} == {"teraio::stage forward", "teraio::stage backward"}
    for parameter in training.module.parameters():
        parameter.data = parameter.data.clone()
    training.run(random_rows(3), stepping(training))
    assert training.progress[-1][0].iterations == 8
    training.finish()
