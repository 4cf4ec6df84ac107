"""The demo: both trainings take turns, its figure has a spread, and it leaves nothing outside of its folder."""

import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import pytest
from rich.console import Console
from rich.progress import Progress

from examples import train_text
from examples.gpt import GPTConfig
from examples.report import speed_line
from examples.train_text import Running, both, device_budget, take_turns, write_page
from examples.training import Report, Setting, Step

MIB = 2**20


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


@pytest.mark.parametrize(
    ("phases", "at_most", "taken"),
    [("profile profile planning planned planned", 9, 4), ("profile planning planning planned", 9, 4), ("profile " * 9, 6, 6)],
)
def test_a_training_comes_to_its_plan(phases: str, at_most: int, taken: int) -> None:
    order: list[str] = []
    running = training("second", [step(phase) for phase in phases.split()], order)
    running.come_to_plan(at_most)
    assert len(running.steps) == taken and order.count("planned") == phases.split()[:taken].count("planning")


def test_the_budget_is_half_of_the_peak_less_what_is_no_tensor() -> None:
    assert device_budget(step()) == (500 - 200 - 96) * MIB


class GivenWorker:
    """In place of a worker: five steps without a plan, then steps with one, if it has a budget. Keeps what it was given."""

    made: ClassVar[list[tuple[Setting, Path, Mapping[str, str]]]] = []

    def __init__(self, setting: Setting, log: Path, environment: Mapping[str, str]) -> None:
        self.made.append((setting, log, environment))
        phases = ["profile"] * 4 + ["planning"] if "memory_budget" in setting.options else ["fits"] * 5
        self._phases = itertools.chain(phases, itertools.repeat("planned" if "memory_budget" in setting.options else "fits"))
        self.wait_for_plan = self.close = lambda: None

    def step(self) -> Step:
        return step(next(self._phases))

    def finish(self) -> Report:
        return Report(peak_bytes=1, rest_bytes=1, parameters=1, status=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def test_both_take_as_many_steps_within_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_text, "Worker", GivenWorker)
    monkeypatch.setattr(GivenWorker, "made", [])
    first, second = both(Setting(options={"codegen": "eager"}), 24, 2, tmp_path, Console(quiet=True))
    assert len(first.steps) == len(second.steps) == 6 + 2 * 2 and len(first.turns) == len(second.turns) == 2
    (plain, _, _), (limited, _, _) = GivenWorker.made
    assert plain.options == {"codegen": "eager"} and limited.options["memory_budget"] == device_budget(step())
    assert limited.options["plan_cache"] == limited.options["tiles"] == "off" and limited.options["storage"] == str(tmp_path)
    for _, log, environment in GivenWorker.made:
        assert log.parent == tmp_path
        assert all(environment[name].startswith(str(tmp_path)) for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR"))


@pytest.mark.long
def test_it_leaves_nothing_outside_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HOME", "XDG_CACHE_HOME", "TMPDIR"):
        (tmp_path / variable).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(train_text, "device_budget", lambda peak: peak.device_peak_bytes // 2)
    model = GPTConfig(layers=3, width=256, heads=4, context=128)
    setting = Setting(model=model, batch=8, deterministic=True)
    output = tmp_path / "output"
    first, second = both(setting, 24, 2, output, Console(quiet=True))
    assert [one.loss for one in first.steps] == [other.loss for other in second.steps] and len(first.turns) == 2
    assert "<html" in write_page(output).read_text()
    outside = [file for file in tmp_path.rglob("*") if not file.is_dir() and not file.is_relative_to(output)]
    assert not outside, [os.fspath(file) for file in outside]
    assert {file.name for file in output.iterdir()} == {
        *("all-the-memory.log", "half-the-memory.log", "temporary", "plan.json", "report.html", "trace.json")
    }
