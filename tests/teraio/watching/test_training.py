"""A real training under a budget, watched: what the data says agrees with teraio's status and with the files."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import teraio
from planner import UnsupportedError
from teraio.watching import read_csv

from ...training import MIB, mean_square_step, random_rows, weights_of_1_mib

STEPS = 4


def test_what_is_watched_agrees(tmp_path: Path, quick_links: None) -> None:
    told: list[teraio.IterationStats] = []
    writer = teraio.CsvWriter(tmp_path / "run.csv")
    ends = [teraio.on_iteration(told.append), teraio.on_iteration(writer)]
    try:
        training = weights_of_1_mib(
            {"memory_budget": 11 * MIB, "storage": tmp_path, "profile_iterations": 9}, count=8, momentum=0.9
        )
        with pytest.raises(UnsupportedError, match="stats: no run of teraio manages a parameter of this model"):
            teraio.stats(training.model)
        training.run(random_rows(STEPS), lambda batch, index: mean_square_step(training, batch))
        stats = teraio.stats(training.model)
        assert stats.iterations == tuple(told) and [each.iteration for each in told] == list(range(STEPS))
        (status,) = training.progress[-1]
        assert stats.status.iterations == STEPS and {each.phase for each in told} == {"profile"}
        for link, moved in status.moved_bytes.items():
            assert sum(each.moved_bytes[link] for each in told) <= moved, "copies may go on between two iterations"
        last = told[-1]
        assert last.seconds > last.waited_seconds >= 0.0 and last.predicted_seconds is None
        assert 0 < last.tier_bytes["device"] <= 11 * MIB and last.tier_bytes["storage"] > 0
        assert sum(last.tier_bytes.values()) >= 8 * MIB
        assert last.moved_bytes["device->storage"] > 0 and last.bytes_per_second("storage->device")
        training.finish()
    finally:
        for end in ends:
            end()
            end()  # not twice
        writer.close()
    assert read_csv(tmp_path / "run.csv") == tuple(told)


def test_a_model_that_nobody_compiled() -> None:
    with pytest.raises(UnsupportedError, match="compile the model with teraio and train for a step first"):
        teraio.stats(nn.Linear(2, 2))


def test_what_a_watcher_raises_the_loop_raises(tmp_path: Path) -> None:
    def fail(stats: teraio.IterationStats) -> None:
        raise KeyError("mine")

    end = teraio.on_iteration(fail)
    try:
        training = weights_of_1_mib({}, count=1)
        with pytest.raises(KeyError, match="mine"):
            mean_square_step(training, torch.randn(16, 512))
    finally:
        end()
    training.finish()


def test_a_watcher_is_interrupted_at_once_and_may_replace_handlers(tmp_path: Path) -> None:
    training = weights_of_1_mib({"memory_budget": 11 * MIB, "storage": tmp_path}, count=8, momentum=0.9)
    done = []

    def watch(stats: teraio.IterationStats) -> None:
        if stats.iteration == 1:
            signal.signal(signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_IGN))
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if stats.iteration == 2:
            signal.raise_signal(signal.SIGINT)
        done.append(stats.iteration)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    end = teraio.on_iteration(watch)
    try:
        with pytest.raises(KeyboardInterrupt):
            training.run(random_rows(4), lambda batch, index: mean_square_step(training, batch))
        assert done == [0, 1] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        training.run(random_rows(2), lambda batch, index: mean_square_step(training, batch))
    finally:
        end()
        signal.signal(signal.SIGINT, before)
    assert done == [0, 1, 3, 4]
    training.finish()


def test_iterations_are_told_on_where_all_parameters_get_other_memory_while_everything_fits() -> None:
    """As by `PostLocalSGDOptimizer`. Graphs run unmanaged then, and make no blocks of the new memory."""
    training = weights_of_1_mib({"profile_iterations": 1}, count=2)
    training.run(random_rows(4), lambda batch, index: mean_square_step(training, batch))
    assert training.progress[-1][0].phase == "fits"
    for parameter in training.module.parameters():
        parameter.data = parameter.data.clone()
    training.run(random_rows(3), lambda batch, index: mean_square_step(training, batch))
    assert training.progress[-1][0].iterations == 7
    training.finish()
