"""The demo's parts: real and repeatable text, a model that learns it, memory as the system sees it."""

import itertools
from pathlib import Path

import pytest
import torch

from examples.gpt import GPT, GPTConfig
from examples.memory import give_free_memory_back, resident_bytes
from examples.text import batches, standard_library_text
from examples.training import Setting, Training
from examples.worker import Worker, WorkerFailed

TINY = GPTConfig(layers=2, width=32, heads=2, context=64)


def test_the_text_is_python_and_the_same_every_time() -> None:
    text = standard_library_text(200_000)
    assert len(text) == 200_000
    assert b"def __init__(self" in bytes(text.tolist())
    assert torch.equal(text, standard_library_text(200_000))


def test_targets_are_the_next_bytes() -> None:
    text = standard_library_text(10_000)
    for tokens, targets in itertools.islice(batches(text, batch=3, context=16, seed=7), 4):
        assert tokens.shape == targets.shape == (3, 16)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_checkpointed_layers_give_the_same_loss_and_gradients() -> None:
    text = standard_library_text(10_000)
    tokens, targets = next(batches(text, batch=2, context=64, seed=1))
    results = []
    for checkpointed in (0, 2):
        torch.manual_seed(0)
        config = GPTConfig(layers=2, width=32, heads=2, context=64, checkpointed_layers=checkpointed)
        model = GPT(config)
        loss = model(tokens, targets)
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_worker_trains_in_its_own_process(tmp_path: Path) -> None:
    setting = Setting(backend="eager", model=TINY, batch=4, learning_rate=3e-3, text_bytes=100_000)
    with Worker(setting, tmp_path / "log") as worker:
        steps = [*(worker.step() for _ in range(10)), worker.steps(2)]
        worker.reset_peak()
        report = worker.finish()
    assert steps[-1].loss < steps[0].loss - 0.5
    assert all(0 < step.optimizer_seconds < step.seconds for step in steps)
    assert report.parameters == sum(parameter.numel() for parameter in GPT(TINY).parameters())
    assert report.peak_bytes >= report.rest_bytes > 0
    assert 8 * report.parameters < report.state_bytes < 8.1 * report.parameters, "two of four bytes each, and step counters"
    assert report.status is None


def test_a_worker_that_fails_says_why(tmp_path: Path) -> None:
    setting = Setting(backend="inductor", options={"no_such_option": 1}, model=TINY)
    log = tmp_path / "log"
    with pytest.raises(WorkerFailed, match="no_such_option") as caught, Worker(setting, log) as worker:
        worker.step()
    assert "no_such_option" in caught.value.reason


def test_a_worker_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="no answer for 0.01 s"):
        Worker(Setting(backend="eager", model=TINY), tmp_path / "log", patience_seconds=0.01)


def test_a_training_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="stopped at its limit of 0.01 s"):
        Worker(Setting(backend="eager", model=TINY), tmp_path / "log", limit_seconds=0.01)


def test_steps_in_a_group_are_the_same_steps() -> None:
    setting = Setting(backend="eager", model=TINY, batch=4, text_bytes=100_000)
    one_by_one, grouped = Training(setting), Training(setting)
    single = [one_by_one.step() for _ in range(5)]
    groups = [grouped.steps(2), grouped.steps(3)]
    assert [group.loss for group in groups] == [single[1].loss, single[4].loss]
    assert [group.iterations for group in groups] == [2, 3] and single[0].iterations == 1
    assert all(0 < group.optimizer_seconds < group.seconds for group in groups)


def test_resident_bytes_see_an_allocation() -> None:
    give_free_memory_back()  # what other tests left would be used again
    before = resident_bytes()["RssAnon"]
    kept = torch.ones(32 << 20, dtype=torch.uint8)
    assert resident_bytes()["RssAnon"] - before > 0.9 * len(kept)
