"""Llama trainings, one after another: the memory of a GPU does not hold two at once."""

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
"""Seconds to wait for an answer. The slowest is the first iteration of the largest model, which compiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaScale:
    """Which Llamas are trained, and where. `sizes`: empty for each part's default. `limit_seconds`: no training starts later."""

    device: str
    dtype: str
    sizes: tuple[str, ...]
    batch: int
    context: int
    rounds: int
    limit_seconds: float
    output: Path

    def setting(self, size: str, backend: str = "teraio", *, checkpointed_layers: int = 0, **fields: Any) -> Setting:
        """Return the training of the Llama of that name. `fields`: other fields of the setting."""
        model = dataclasses.replace(SIZES[size], context=self.context, checkpointed_layers=checkpointed_layers)
        common = {"backend": backend, "model": model, "batch": self.batch, "device": self.device, "dtype": self.dtype}
        return Setting.model_validate({**common, **fields})


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training after its warm-up: consecutive `steps`, then one under the profiler.

    phase: of teraio, "" for another backend. moved_bytes: per iteration, by link. busy_seconds: how long the device computed in
    an iteration; None if the profiler saw nothing. trace, plan: of teraio, if it wrote them.
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
        """Median seconds of an iteration."""
        return median(step.seconds for step in self.steps)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second in the median iteration."""
        return self.steps[0].tokens / self.seconds

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of tensors after the first iteration: by the GPU's allocator; on CPU by the peak of the process."""
        return self.report.peak_bytes - self.report.rest_bytes

    @property
    def spread(self) -> str:
        """The fastest and the slowest iteration, as text."""
        seconds = [step.seconds for step in self.steps]
        return f"{len(seconds)} iterations from {min(seconds):.4g} to {max(seconds):.4g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A training that did not run. `reason`: why."""

    reason: str


Outcome = Run | Missing


class Runner:
    """Runs trainings. Each setting runs once: parts that need the same one share it."""

    def __init__(self, scale: LlamaScale, clock: Callable[[], float] = time.monotonic) -> None:
        self.scale = scale
        self._clock = clock
        self._began = clock()
        self._known: dict[str, Outcome] = {}
        self.samples: dict[str, list[float]] = {}
        """Seconds of all counted iterations, by name."""

    def run(self, name: str, setting: Setting) -> Outcome:
        """Return the outcome of `setting`. Runs it if it has not run yet, and waits meanwhile."""
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
        """Train the Llama of that name without a budget."""
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
    """Train in a process of its own until `scale.rounds` iterations and COUNTED_SECONDS are over, at most MAX_STEPS iterations.

    trace, plan: the files that teraio writes. Raises WorkerFailed.
    """
    on_teraio = setting.backend == "teraio"
    with Worker(setting, log, EXACT_MEMORY, PATIENCE_SECONDS) as worker:
        worker.step()
        worker.reset_peak()  # excludes what the compiler tried out, includes the profiled iterations
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
    """Return tokens per second, compared with `base`, or why there are none."""
    if isinstance(outcome, Missing):
        return Figure(name=f"{name}: tokens/s", value=None, unit="", note=outcome.reason)
    notes = [outcome.phase, outcome.spread]
    if isinstance(base, Run) and base is not outcome:
        notes.insert(0, f"{outcome.tokens_per_second / base.tokens_per_second:.3f} x Inductor")
    note = "; ".join(filter(None, notes))
    return Figure(name=f"{name}: tokens/s", value=outcome.tokens_per_second, unit="", note=note)
