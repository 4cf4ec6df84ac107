"""Llama trainings, one after another: the memory of a GPU does not hold two at once."""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
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
GROUP_SECONDS = 1.0
"""A group of iterations is timed as one. It takes about so long, so that waiting for its end costs nothing worth knowing."""
MAX_STEPS = 60
PATIENCE_SECONDS = 600.0
"""Seconds to wait for an answer. The slowest is the first iteration of the largest model, which compiles."""


TRAININGS = "trainings.jsonl"
"""The file in the output folder to which each training is appended, as one line."""
WORKER = "examples.worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaScale:
    """Which Llamas are trained, and where. `sizes`: empty for each part's default. `limit_seconds`: no training starts later.

    `training_seconds`: a training that takes longer is stopped; None for no limit.
    """

    device: str
    dtype: str
    sizes: tuple[str, ...]
    batch: int
    context: int
    rounds: int
    limit_seconds: float
    output: Path
    training_seconds: float | None = None

    def setting(self, size: str, backend: str = "teraio", *, checkpointed_layers: int = 0, **fields: Any) -> Setting:
        """Return the training of the Llama of that name. `fields`: other fields of the setting."""
        model = dataclasses.replace(SIZES[size], context=self.context, checkpointed_layers=checkpointed_layers)
        common = {"backend": backend, "model": model, "batch": self.batch, "device": self.device, "dtype": self.dtype}
        return Setting.model_validate({**common, **fields})


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training after its warm-up: consecutive groups of iterations, each one of `steps`; then one under the profiler.

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
        count = sum(step.iterations for step in self.steps)
        groups = f" in {len(seconds)} groups" if count > len(seconds) else ""
        return f"{count} iterations{groups} from {min(seconds):.4g} to {max(seconds):.4g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A training that did not run. `reason`: why."""

    reason: str


Outcome = Run | Missing


class Runner:
    """Runs trainings. Each setting runs once: parts that need the same one share it.

    What a training gave is appended to the file TRAININGS in the output folder as soon as it has ended.
    """

    def __init__(self, scale: LlamaScale, clock: Callable[[], float] = time.monotonic) -> None:
        self.scale = scale
        self._clock = clock
        self._began = clock()
        self._known: dict[str, Outcome] = {}
        self.samples: dict[str, list[float]] = {}
        """Seconds of all counted iterations, by name."""

    def run(self, name: str, setting: Setting, program: str = WORKER) -> Outcome:
        """Return the outcome of `setting`. Runs it if it has not run yet, and waits meanwhile. program: of its process."""
        key = setting.model_dump_json()
        if key not in self._known:
            limit = self.scale.limit_seconds
            late = self._clock() - self._began >= limit
            outcome = Missing(reason=f"not run: the {limit:.0f} s are over") if late else self._measured(name, setting, program)
            if isinstance(outcome, Run):
                self.samples[name] = [step.seconds for step in outcome.steps]
            self._known[key] = outcome
            if not late:
                append(self.scale.output / TRAININGS, {"training": name, "setting": setting.model_dump(), **told(outcome)})
        return self._known[key]

    def plain(self, size: str, backend: str) -> Outcome:
        """Train the Llama of that name without a budget."""
        return self.run(f"{size}, {backend}", self.scale.setting(size, backend))

    def _measured(self, name: str, setting: Setting, program: str) -> Outcome:
        name = "".join(letter if letter.isalnum() else "-" for letter in name)
        written = {what: self.scale.output / f"{name}-{what}.json" for what in ("trace", "plan")}
        if setting.backend == "teraio":
            for path in written.values():
                path.unlink(missing_ok=True)
            files = {f"{what}_out": str(path) for what, path in written.items()}
            setting = setting.model_copy(update={"options": {**setting.options, **files}})
        try:
            return measured(setting, self.scale, self.scale.output / f"{name}.log", **written, program=program)
        except WorkerFailed as failure:
            return Missing(reason=failure.reason)


def told(outcome: Outcome) -> dict[str, Any]:
    """Return what a training gave, for a line of TRAININGS."""
    if isinstance(outcome, Missing):
        return {"missing": outcome.reason}
    return {
        "tokens_per_second": outcome.tokens_per_second,
        "phase": outcome.phase,
        "steps": [step.model_dump() for step in outcome.steps],
        "moved_bytes": outcome.moved_bytes,
        "busy_seconds": outcome.busy_seconds,
        "report": outcome.report.model_dump(),
        "predicted": None if outcome.plan is None or outcome.plan.predicted is None else outcome.plan.predicted.model_dump(),
    }


def measured(setting: Setting, scale: LlamaScale, log: Path, *, trace: Path, plan: Path, program: str = WORKER) -> Run:
    """Train in a process of its own until `scale.rounds` groups and COUNTED_SECONDS are over, at most MAX_STEPS iterations.

    trace, plan: the files that teraio writes. program: of the process. If the training's time is over once a group has ended, the
    groups so far count. Raises WorkerFailed.
    """
    on_teraio = setting.backend == "teraio"
    with Worker(setting, log, EXACT_MEMORY, PATIENCE_SECONDS, program, scale.training_seconds) as worker:
        worker.step()
        worker.reset_peak()  # excludes what the compiler tried out, includes the profiled iterations
        phase = warm_up(worker, 5 if on_teraio else 1)  # four are profiled
        before = worker.step()
        size = max(1, min(MAX_STEPS // scale.rounds, round(GROUP_SECONDS / before.seconds)))
        steps: list[Step] = []
        while _goes_on(steps, scale.rounds) and (not steps or worker.left_seconds > 4 * size * steps[-1].seconds):
            steps.append(worker.steps(size))
        busy_seconds = worker.busy_seconds()
        report = worker.finish()
    last, iterations = steps[-1].moved_bytes, sum(step.iterations for step in steps)
    return Run(
        steps=tuple(steps),
        phase=phase,
        moved_bytes={link: (moved - before.moved_bytes.get(link, 0)) / iterations for link, moved in last.items()},
        busy_seconds=busy_seconds or None,
        report=report,
        trace=Trace.load(trace) if on_teraio and trace.exists() else None,
        plan=Plan.load(plan) if on_teraio and plan.exists() else None,
    )


def _goes_on(steps: Sequence[Step], rounds: int) -> bool:
    """Return whether more groups are wanted."""
    count, seconds = sum(s.iterations for s in steps), sum(s.seconds * s.iterations for s in steps)
    return len(steps) < rounds or (count < MAX_STEPS and seconds < COUNTED_SECONDS)


def append(path: Path, line: dict[str, Any]) -> None:
    """Append `line` and the time to a file of JSON lines. What was written stays, whatever happens next."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"at": datetime.now(UTC).isoformat(timespec="seconds"), **line}) + "\n")


def speed(name: str, outcome: Outcome, base: Outcome | None = None) -> Figure:
    """Return tokens per second, compared with `base`, or why there are none."""
    if isinstance(outcome, Missing):
        return Figure(name=f"{name}: tokens/s", value=None, unit="", note=outcome.reason)
    notes = [outcome.phase, outcome.spread]
    if isinstance(base, Run) and base is not outcome:
        notes.insert(0, f"{outcome.tokens_per_second / base.tokens_per_second:.3f} x Inductor")
    note = "; ".join(filter(None, notes))
    return Figure(name=f"{name}: tokens/s", value=outcome.tokens_per_second, unit="", note=note)
