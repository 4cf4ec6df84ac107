"""Trainings that nobody runs, and a small trace, for the tests of the benchmarks' parts and figures."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.__main__ import llama_scale_for
from benchmarks.alone import LlamaScale, Missing, Outcome, Run, Runner
from benchmarks.results import Figure
from examples.training import Report, Setting, Step
from planner import Trace

from ..planner.traces import block, links, staged, trace

GIB = 2**30


def a_trace() -> Trace:
    machine = {
        **links({"device->storage": 1e9, "storage->device": 2e9}),
        "device_memory_bytes": 16 * GIB,
        "storage_bytes": 64 * GIB,
    }
    return trace(staged("ffff", 0.5), [block(GIB, [], [2 * i], "parameter") for i in range(2)], machine)


def steps(*seconds: float) -> tuple[Step, ...]:
    return tuple(Step(loss=1.0, seconds=each, tokens=600, phase="planned", resident_bytes={}) for each in seconds)


def run(*seconds: float, peak: int = GIB, **changes: Any) -> Run:
    report = Report(peak_bytes=peak, rest_bytes=0, parameters=1, status=changes.pop("status", None))
    report = report.model_copy(update={"peak_reserved_bytes": changes.pop("reserved", None)})
    fields: dict[str, Any] = {"phase": "", "moved_bytes": {}, "busy_seconds": None, "report": report} | changes
    return Run(steps=steps(*seconds), **fields)


def by_name(figures: Iterable[Figure]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures}


def tiny_scale(folder: Path, **changes: Any) -> LlamaScale:
    scale = llama_scale_for("cpu", folder, 2, sizes=[], dtype=None, minutes=10, batch=1, context=16)
    return replace(scale, **changes)


class MadeUp(Runner):
    """Runs nothing: outcomes by what the setting is. fails: words of the names of trainings that fail."""

    def __init__(
        self, folder: Path, *, fails: tuple[str, ...] = (), clock: Callable[[], float] = lambda: 0.0, **changes: Any
    ) -> None:
        super().__init__(tiny_scale(folder, **changes), clock)
        self.settings: dict[str, Setting] = {}
        self.fails = fails

    def _measured(self, name: str, setting: Setting, program: str) -> Outcome:
        self.settings[name] = setting
        if any(word in name for word in self.fails):
            return Missing(reason=f"{name} failed")
        if setting.backend == "teraio":
            budget = setting.options.get("memory_budget")
            status = {"ideal_iteration_seconds": 1.0, "device_peak_bytes": budget}
            moved = {} if budget is None else {"device->storage": 1e9}
            peak = budget or 10 * GIB
            return run(2.0, peak=peak, status=status, phase="demand", moved_bytes=moved, busy_seconds=0.5, trace=a_trace())
        layers = setting.model.checkpointed_layers
        return run(1.6, peak=10 * GIB - layers * GIB, busy_seconds=0.4)
