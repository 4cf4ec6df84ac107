"""The time from the start of a process to its first planned iteration: cold, with empty caches, and warm, right after that.

The demo's model under half of the memory that it takes without a budget. Caches: Inductor's, with the C++ functions of teraio,
and teraio's own of plans, each in a new folder. Processor time counts all processes of the training, compilers and solver
included, up to the end of the first planned iteration.
"""

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.results import Figure
from benchmarks.turns import Scale, tensor_peak
from examples.gpt import GPTConfig
from examples.training import Setting
from examples.worker import EXACT_MEMORY, Worker

AIM = "<= 0.25"
_MOST_STEPS = 60
_PATIENCE_SECONDS = 1800.0
"""A cold start compiles for minutes on a machine that does much else."""


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the training: seconds to the first planned iteration, processor seconds, and iterations before it."""

    seconds: float
    processor_seconds: float
    iterations: int


def setting(scale: Scale) -> Setting:
    """Return the demo's training."""
    return Setting(model=GPTConfig(), batch=8, device="cuda" if scale.device == "cuda" else "cpu")


def start(training: Setting, log: Path, environment: dict[str, str]) -> Start:
    """Train in a process of its own until an iteration has followed a plan. Raises WorkerFailed."""
    before, began = _processor_seconds(), time.perf_counter()
    with Worker(training, log, {**EXACT_MEMORY, **environment}, _PATIENCE_SECONDS) as worker:
        iterations, step_began = 0, time.perf_counter()
        while worker.step().phase != "planned" and iterations < _MOST_STEPS:
            iterations, step_began = iterations + 1, time.perf_counter()
        worker.finish()
    return Start(step_began - began, _processor_seconds() - before, iterations)


def _processor_seconds() -> float:
    """Return the processor time of all processes that were started from this one and have ended."""
    times = os.times()
    return times.children_user + times.children_system


def measure(scale: Scale) -> tuple[tuple[Figure, ...], dict[str, list[float]]]:
    """Return both times and their ratio, as wall time and as processor time, as medians over `scale.rounds` pairs of starts."""
    plain = setting(scale)
    options: dict[str, Any] = {"memory_budget": tensor_peak(plain, "warm start peak", scale.output) // 2}
    options |= {"storage": str(scale.output), "plan_cache": "read-write"}
    cold, warm = [], []
    for _ in range(scale.rounds):
        with tempfile.TemporaryDirectory(prefix="warm-start-") as folder:
            caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "XDG_CACHE_HOME": folder}
            training = plain.model_copy(update={"options": options})
            cold.append(start(training, scale.output / "cold-start.log", caches))
            warm.append(start(training, scale.output / "warm-start.log", caches))
    return figures(cold, warm), samples(cold, warm)


def figures(cold: list[Start], warm: list[Start]) -> tuple[Figure, ...]:
    """Return the figures of pairs of starts."""
    return (
        *_of("time to the first planned iteration", [c.seconds for c in cold], [w.seconds for w in warm]),
        *_of("processor time", [c.processor_seconds for c in cold], [w.processor_seconds for w in warm]),
        Figure(name="iterations before it, cold", value=median(c.iterations for c in cold), unit=""),
        Figure(name="iterations before it, warm", value=median(w.iterations for w in warm), unit="", aim="<= 1"),
    )


def _of(what: str, cold: list[float], warm: list[float]) -> tuple[Figure, ...]:
    shares = [after / before for before, after in zip(cold, warm, strict=True)]
    return (
        Figure(name=f"{what}, cold", value=median(cold), unit="s"),
        Figure(name=f"{what}, warm", value=median(warm), unit="s"),
        Figure(name=f"{what}, warm / cold", value=median(shares), unit="", aim=AIM),
    )


def samples(cold: list[Start], warm: list[Start]) -> dict[str, list[float]]:
    """Return the raw numbers."""
    return {
        f"{name}, {kind}": [getattr(each, field) for each in starts]
        for kind, starts in (("cold", cold), ("warm", warm))
        for name, field in (("seconds", "seconds"), ("processor seconds", "processor_seconds"))
    }
