"""Llama trainings that run one after another, each alone on the device: a GPU's memory holds no two of them."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.results import Figure
from benchmarks.turns import warm_up
from examples.llama import SIZES
from examples.training import Report, Setting, Step
from examples.worker import EXACT_MEMORY, Worker, WorkerFailed
from planner import Plan, Trace

COUNTED_SECONDS = 4.0
MAX_STEPS = 20
PATIENCE_SECONDS = 600.0
"""For the slowest answer: the first iteration of the largest model, which compiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaScale:
    """Which Llamas are trained, and where. No `sizes`: each part's own. `limit_seconds`: no training starts later."""

    device: str
    dtype: str
    sizes: tuple[str, ...]
    batch: int
    context: int
    rounds: int
    limit_seconds: float
    output: Path

    def setting(self, size: str, backend: str = "teraio", *, checkpointed_layers: int = 0, **fields: Any) -> Setting:
        """A training of the Llama of that name; `fields` are the setting's other ones."""
        model = dataclasses.replace(SIZES[size], context=self.context, checkpointed_layers=checkpointed_layers)
        common = {"backend": backend, "model": model, "batch": self.batch, "device": self.device, "dtype": self.dtype}
        return Setting.model_validate({**common, **fields})


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a training did once it was warm: `steps` in a row, then one in which the profiler saw the device at work.

    phase: teraio's, "" for another backend. moved_bytes: in an iteration, by link. busy_seconds: how long the device computed
    in an iteration; None if the profiler saw nothing. trace, plan: teraio's, if it wrote them.
    """

    steps: Sequence[Step]
    phase: str
    moved_bytes: dict[str, float]
    busy_seconds: float | None
    report: Report
    trace: Trace | None = None
    plan: Plan | None = None

    @cached_property
    def seconds(self) -> float:
        """Of an iteration, the median."""
        return median(step.seconds for step in self.steps)

    @property
    def tokens_per_second(self) -> float:
        """Of the median iteration."""
        return self.steps[0].tokens / self.seconds

    @property
    def peak_bytes(self) -> int:
        """Of tensors, after the first iteration: by the GPU's allocator, or on CPU the process less what else it takes."""
        return self.report.peak_bytes - self.report.rest_bytes

    @property
    def spread(self) -> str:
        """The fastest and the slowest iteration, as a note."""
        seconds = [step.seconds for step in self.steps]
        return f"{len(seconds)} iterations from {min(seconds):.4g} to {max(seconds):.4g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A training that did not run, and why."""

    reason: str


Outcome = Run | Missing


class Runner:
    """Runs trainings, each setting once: parts that ask for the same one share it."""

    def __init__(self, scale: LlamaScale, clock: Callable[[], float] = time.monotonic) -> None:
        self.scale = scale
        self._clock = clock
        self._began = clock()
        self._known: dict[str, Outcome] = {}
        self.samples: dict[str, list[float]] = {}
        """Seconds of all counted iterations, by name."""

    def run(self, name: str, setting: Setting) -> Outcome:
        """What came of `setting`; blocks while it runs, unless it has run already, under this name or another."""
        key = setting.model_dump_json()
        if key not in self._known:
            limit = self.scale.limit_seconds
            late = self._clock() - self._began >= limit
            outcome = Missing(reason=f"not run: the {limit:.0f} s are over") if late else self._measured(name, setting)
            if isinstance(outcome, Run):
                self.samples[name] = [step.seconds for step in outcome.steps]
            self._known[key] = outcome
        return self._known[key]

    def plain(self, size: str, backend: str) -> Outcome:
        """The Llama of that name without a budget."""
        return self.run(f"{size}, {backend}", self.scale.setting(size, backend))

    def _measured(self, name: str, setting: Setting) -> Outcome:
        name = "".join(letter if letter.isalnum() else "-" for letter in name)
        written = {what: self.scale.output / f"{name}-{what}.json" for what in ("trace", "plan")}
        if setting.backend == "teraio":
            for path in written.values():
                path.unlink(missing_ok=True)
            files = {f"{what}_out": str(path) for what, path in written.items()}
            setting = setting.model_copy(update={"options": {**setting.options, **files}})
        try:
            return measured(setting, self.scale, self.scale.output / f"{name}.log", **written)
        except WorkerFailed as failure:
            return Missing(reason=failure.reason)


def measured(setting: Setting, scale: LlamaScale, log: Path, *, trace: Path, plan: Path) -> Run:
    """Trains in a process of its own, until `scale.rounds` iterations and COUNTED_SECONDS are over, or MAX_STEPS.

    Raises WorkerFailed. `trace`, `plan`: where teraio writes them.
    """
    on_teraio = setting.backend == "teraio"
    with Worker(setting, log, EXACT_MEMORY, PATIENCE_SECONDS) as worker:
        worker.step()
        worker.reset_peak()  # from now on: what the compiler tried out is not counted, what is profiled is
        phase = warm_up(worker, 5 if on_teraio else 1)  # four are profiled
        before = worker.step()
        steps: list[Step] = []
        while len(steps) < scale.rounds or (len(steps) < MAX_STEPS and sum(s.seconds for s in steps) < COUNTED_SECONDS):
            steps.append(worker.step())
        busy_seconds = worker.busy_seconds()
        report = worker.finish()
    last = steps[-1].moved_bytes
    return Run(
        steps=tuple(steps),
        phase=phase,
        moved_bytes={link: (size - before.moved_bytes.get(link, 0)) / len(steps) for link, size in last.items()},
        busy_seconds=busy_seconds or None,
        report=report,
        trace=Trace.load(trace) if on_teraio and trace.exists() else None,
        plan=Plan.load(plan) if on_teraio and plan.exists() else None,
    )


def speed(name: str, outcome: Outcome, base: Outcome | None = None) -> Figure:
    """Tokens per second, beside those of `base`, or why there are none."""
    if isinstance(outcome, Missing):
        return Figure(name=f"{name}: tokens/s", value=None, unit="", note=outcome.reason)
    notes = [outcome.phase, outcome.spread]
    if isinstance(base, Run) and base is not outcome:
        notes.insert(0, f"{outcome.tokens_per_second / base.tokens_per_second:.3f} x Inductor")
    note = "; ".join(filter(None, notes))
    return Figure(name=f"{name}: tokens/s", value=outcome.tokens_per_second, unit="", note=note)
