"""The demo's parts: repeatable text, a model that learns it, memory as the system sees it, and its verdict."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.progress import Progress

from examples.gpt import GPT, GPTConfig
from examples.report import Run, faults, losses_table, speed_line, summary_table
from examples.text import batches, standard_library_text
from examples.train_larger import live, table
from examples.train_text import Running, device_budget, take_turns
from examples.training import Report, Setting, Step, computing_seconds
from examples.worker import Worker, WorkerFailed

TINY = GPTConfig(layers=2, width=32, heads=2, context=64)


def test_targets_are_the_next_bytes() -> None:
    text = standard_library_text(10_000)
    for tokens, targets in itertools.islice(batches(text, batch=3, context=16, seed=7), 4):
        assert tokens.shape == targets.shape == (3, 16)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])


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
    setting = Setting(options={"no_such_option": 1}, model=TINY, text_bytes=100_000)
    log = tmp_path / "log"
    with pytest.raises(WorkerFailed, match="no_such_option") as caught, Worker(setting, log) as worker:
        worker.step()
    assert "no_such_option" in caught.value.reason


def test_computing_is_what_ran_on_the_device_but_copies() -> None:
    def event(name: str, start: float, end: float, device: str = "CUDA", annotation: bool = False) -> SimpleNamespace:
        span, kind = SimpleNamespace(start=start, end=end), SimpleNamespace(name=device)
        return SimpleNamespace(name=name, device_type=kind, time_range=span, is_user_annotation=annotation)

    events = [
        event("kernel", 0, 10),
        event("kernel", 5, 20),
        event("Memcpy DtoD (Device -> Device)", 30, 40),
        event("Memcpy HtoD (Pinned -> Device)", 50, 90),
        event("Memcpy DtoH (Device -> Pinned)", 50, 90),
        event("Optimizer.step#AdamW.step", 0, 100, annotation=True),
        event("aten::mm", 0, 100, device="CPU"),
    ]
    assert computing_seconds(events, "CUDA") == pytest.approx(30e-6)
    assert computing_seconds(events, "CPU") == pytest.approx(100e-6)


def test_a_model_larger_than_its_budgets_lives_within_them(tmp_path: Path) -> None:
    budgets = {"memory_budget": 20 * MIB, "host_budget": 4 * MIB}
    config = GPTConfig(layers=3, width=512, heads=4, context=32)
    life = live(config, {**budgets, "storage": tmp_path, "codegen": "eager"}, None, tmp_path, steps=2)
    names = ["born", "saved as safetensors", "loaded", "trained", "saved", "looked at", "parked", "trained on", "closed"]
    assert [step.name for step in life.steps] == names and table(life, sum(budgets.values())).row_count == len(names)
    moved = {step.name: step.moved_bytes for step in life.steps}
    assert moved["loaded"]["storage->device"] == 0 < moved["born"]["device->storage"]
    assert (tmp_path / "training.pt").stat().st_size > 3 * (tmp_path / "model.safetensors").stat().st_size > 100 * MIB
    before_closing = life.steps[:-1]
    assert all(step.held_bytes < life.before_bytes + sum(budgets.values()) + 96 * MIB for step in before_closing)


# -- the verdict: every way to fail is noticed, and a good run passes

MIB = 2**20


def run(losses: list[float], *, peak_bytes: int, status: dict[str, Any] | None, phase: str = "") -> Run:
    resident = {"VmHWM": peak_bytes, "VmRSS": peak_bytes, "RssAnon": peak_bytes, "RssFile": 0, "RssShmem": 0}
    steps = tuple(Step(loss=loss, seconds=1.0, tokens=64, phase=phase, resident_bytes=resident) for loss in losses)
    report = Report(peak_bytes=peak_bytes, rest_bytes=0, parameters=1_000_000, status=status)
    return Run(name="a run", steps=steps, turns=steps[1:], report=report)


FIRST = run([3.0, 2.5], peak_bytes=100 * MIB, status=None)


def second(losses: tuple[float, ...] = (3.0, 2.5), peak_bytes: int = 50 * MIB, phase: str = "planned", **changes: Any) -> Run:
    moved = {"device->storage": 5 * MIB, "storage->device": 5 * MIB}
    status = {"moved_bytes": moved, "device_peak_bytes": 30 * MIB, "device_budget_bytes": 30 * MIB, **changes}
    return run(list(losses), peak_bytes=peak_bytes, status=status, phase=phase)


def test_equal_losses_in_half_the_memory_pass() -> None:
    assert faults(FIRST, second()) == []
    assert losses_table(FIRST, second()).row_count == 2 and summary_table(FIRST, second()).row_count == 11


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (second((3.0, 2.50001)), "losses of iteration 2 disagree: 2.5 and 2.50001"),
        (second(peak_bytes=51 * MIB), "peaked at 51 MiB, over half of the first run's, 50 MiB"),
        (second(device_peak_bytes=31 * MIB), "took 31 MiB, over their budget of 30 MiB"),
        (second(moved_bytes={"device->storage": 0}), "nothing was moved"),
        (second(phase="profile"), "use more iterations"),
    ],
)
def test_each_fault_is_named(other: Run, message: str) -> None:
    assert any(message in fault for fault in faults(FIRST, other))


# -- both trainings take turns, and the demo's figure has a spread


def step(phase: str = "planned", seconds: float = 1.0) -> Step:
    resident = {"VmHWM": 1000 * MIB, "VmRSS": MIB, "RssFile": 0}
    return Step(loss=1.0, seconds=seconds, tokens=1, phase=phase, resident_bytes=resident, device_peak_bytes=800 * MIB)


def training(name: str, steps: Iterator[Step] | list[Step], order: list[str]) -> Running:
    """A training whose steps are given. order: gets its name at each of them."""
    given = iter(steps)

    def take() -> Step:
        order.append(name)
        return next(given)

    report = Report(peak_bytes=1, rest_bytes=1, parameters=1, status=None)
    worker: Any = SimpleNamespace(step=take, wait_for_plan=lambda: order.append("planned"), finish=lambda: report)
    progress = Progress()
    return Running(name=name, worker=worker, progress=progress, task=progress.add_task(name, total=None, last=""))


def test_speeds_are_compared_turn_by_turn() -> None:
    """The machine gets three times as slow between the turns. The first step of a turn does not count."""
    order: list[str] = []
    first = training("first", [step(seconds=at) for at in (9.0, 1.0, 9.0, 3.0, 9.0, 1.0)], order)
    second = training("second", [step(seconds=at) for at in (99.0, 2.0, 99.0, 5.0, 99.0, 1.25)], order)
    take_turns(first, second, 3)
    assert order == ["first", "first", "second", "second"] * 3
    assert speed_line(first.finish(), second.finish()) == "60% of the speed (in 3 turns from 50% to 80%)"


def test_the_budget_is_half_of_the_peak_less_what_is_no_tensor() -> None:
    assert device_budget(step()) == (500 - 200 - 96) * MIB
