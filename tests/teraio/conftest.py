"""Every test under tests/teraio begins and ends without runtimes, compiled graphs or a used random state."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from runtime.transfer import Engine
from teraio import cli, phases
from teraio.optimizer import OptimizerFacts
from teraio.registry import REGISTRY
from teraio.stages import CutPolicy

from ..runtime.conftest import group, memory
from ..training import MIB, forget
from .in_process import InProcessJob
from .optimizer.managed_training import TieredTraining, Training
from .optimizer.plain_training import SIZE
from .rank_processes import Ranks

__all__ = ["group", "memory"]


@pytest.fixture(autouse=True)
def fresh_process_state() -> Iterator[None]:
    """Drop all runtimes and compiled code before and after the test, and seed torch."""
    _forget()
    yield
    _forget()


def _forget() -> None:
    forget()
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def planning_in_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make plans in this process, except in tests with the mark `planning_process`: each process imports for seconds."""
    if request.node.get_closest_marker("planning_process") is not None:
        request.getfixturevalue("unfrozen")
    else:
        monkeypatch.setattr(REGISTRY, "parts", dataclasses.replace(REGISTRY.parts, start_job=InProcessJob))
        if "unfrozen" not in request.fixturenames:  # all is frozen; Python would go through it to say so
            monkeypatch.setattr("runtime.system.garbage.frozen", lambda: True)


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert not re.sub(r"(?m)^.+ \.\.\.\n", "", self.err), "but for what is told where a machine is slow"
        return json.loads(self.out)


RunCommand = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """Runs a command line in this process as the console script would."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer replaces it

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["teraio", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return Result(int(ended.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """One pair of ranks for all tests that need one."""
    pair = Ranks(tmp_path_factory.mktemp("ranks"))
    yield pair
    pair.close()


@pytest.fixture(autouse=True)
def no_more_iterations_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profile as many iterations as the options say, also if times disagree: tests train for few steps."""
    monkeypatch.setattr(phases, "_LONGEST", 1)


@pytest.fixture
def subgroups_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Fixes the size of subgroups, in bytes, which otherwise follows from what was measured."""

    def fix(size_bytes: int) -> None:
        monkeypatch.setattr(REGISTRY, "parts", dataclasses.replace(REGISTRY.parts, subgroup_bytes=size_bytes))

    return fix


@pytest.fixture
def finely_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are cut wherever they can be, so that small models have many stages, and small budgets do."""
    policy = CutPolicy(shortest_seconds=1e-9)
    monkeypatch.setattr(REGISTRY, "parts", dataclasses.replace(REGISTRY.parts, cut_policy=policy))


@pytest.fixture
def quick_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links are measured in a hurry."""
    monkeypatch.setattr(Engine, "measure", functools.partialmethod(Engine.measure, MIB))


@pytest.fixture
def few_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter whose update is cut inside takes a quarter as many slices: Python's time for each was half of a training's."""
    monkeypatch.setattr("teraio.optimizer.subgroups.SLICES_SHARE", 1)


@pytest.fixture
def same_program_at_every_budget(subgroups_of: Callable[[int], None], quick_links: None) -> None:
    """The size of subgroups follows from budget and rates; a plan is for one program."""
    subgroups_of(MIB)


@pytest.fixture
def deterministic(one_compute_thread: None) -> Iterator[None]:
    """Adding up the gradients of an embedding depends on threads otherwise."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of 4 KiB are large enough to move, as far as optimizers are concerned."""
    monkeypatch.setattr(sys.modules[OptimizerFacts.__module__], "MIN_MOVED_BYTES", SIZE)


@pytest.fixture
def started(small_blocks: None) -> Iterator[Callable[..., Training]]:
    running: list[Training] = []

    def start(*args: Any, **settings: Any) -> Training:
        running.append(Training(*args, **settings))
        return running[-1]

    yield start
    for training in running:
        training.steps.close()


@pytest.fixture
def one_compute_thread() -> Iterator[None]:
    """On several, PyTorch rounds some elements of 16 bits by where each thread's share ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def started_tiered(tmp_path: Path) -> Iterator[Callable[..., TieredTraining]]:
    """Begins training over `drives` directories: one, unless told otherwise."""
    numbers = count()
    running: list[TieredTraining] = []

    def begin(*, drives: int = 1, **settings: Any) -> TieredTraining:
        folders = [tmp_path / str(next(numbers)) for _ in range(drives)]
        for folder in folders:
            folder.mkdir()
        running.append(TieredTraining(folders, **settings))
        return running[-1]

    yield begin
    for training in running:
        training.close()
