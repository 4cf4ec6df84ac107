"""Workers that take turns, so that a slow phase of the machine affects all of them alike."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Protocol

import teraio
from examples.gpt import GPTConfig
from examples.training import Setting, Step
from examples.worker import EXACT_MEMORY, Worker

_MORE_STEPS = 4
"""Steps beyond those asked for that a worker may take to come to its plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The size of the measured models, and the output folder."""

    device: str
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    rounds: int
    output: Path

    def with_small_layers(self) -> "Scale":
        """Return a scale with as many layers, for trainings that are many."""
        return replace(self, width=min(self.width, 256), heads=min(self.heads, 4), context=min(self.context, 256))

    def setting(self, backend: str = "teraio", *, layers: int = 0, checkpointed_layers: int = 0) -> Setting:
        """Return a training of this scale, with `layers` layers if given."""
        model = GPTConfig(
            layers=layers or self.layers,
            width=self.width,
            heads=self.heads,
            context=self.context,
            checkpointed_layers=checkpointed_layers,
        )
        return Setting.model_validate({"backend": backend, "model": model, "batch": self.batch, "device": self.device})


class Stepping(Protocol):
    """A training that takes a step at a time: a worker, or several ranks."""

    def step(self) -> Step:
        """Take one step."""

    def wait_for_plan(self) -> None:
        """Wait until no plan is being made."""


@contextmanager
def workers(
    settings: Mapping[str, Setting],
    output: Path,
    environment: Mapping[str, str] | None = None,
    program: str = "examples.worker",
) -> Iterator[dict[str, Worker]]:
    """Yield one worker for each setting, by name, and end all of them afterwards."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                Worker(setting, output / f"{name.replace(' ', '-').replace('/', '-')}.log", environment, program=program)
            )
            for name, setting in settings.items()
        }


def warm_up(worker: Stepping, steps: int) -> str:
    """Take `steps` steps, wait for the plan, take two more steps, and return the phase.

    Takes some steps more if these do not suffice: on a disturbed machine, more iterations are profiled.
    """
    phases = [worker.step().phase for _ in range(steps)]
    while phases[-1:] == ["profile"] and len(phases) < steps + _MORE_STEPS:
        phases.append(worker.step().phase)
    worker.wait_for_plan()
    worker.step()
    return worker.step().phase


def take_turns(running: Mapping[str, Stepping], rounds: int, turn: int = 3) -> dict[str, list[Step]]:
    """Let each worker take `turn` steps in turn, `rounds` times. The first step of each turn is not returned."""
    taken: dict[str, list[Step]] = {name: [] for name in running}
    for _ in range(rounds):
        for name, worker in running.items():
            taken[name] += [worker.step() for _ in range(turn)][1:]
    return taken


def ratios(over: list[float], under: list[float], turn: int = 3) -> list[float]:
    """Return, for each round, the median of `over` over that of `under`. Their spread shows the noise of the machine."""
    counted = turn - 1
    rounds = [slice(start, start + counted) for start in range(0, len(over), counted)]
    return [median(over[taken]) / median(under[taken]) for taken in rounds]


def spread(values: list[float]) -> str:
    """Return the least and the greatest value of the rounds, as text."""
    return f"rounds from {min(values):.2f} to {max(values):.2f}"


def tensor_peak(setting: Setting, name: str, output: Path, steps: int = 3) -> int:
    """Return the peak bytes of the tensors: the resident peak minus the process without tensors."""
    with workers({name: setting}, output, EXACT_MEMORY) as running:
        worker = running[name]
        worker.step()
        worker.reset_peak()
        for _ in range(steps - 1):
            worker.step()
        report = worker.finish()
    return report.peak_bytes - report.rest_bytes


def waited_seconds() -> float:
    """Return the seconds that training in this process has waited for copies so far, on either link."""
    return sum(sum(status.exposed_seconds.values()) for status in teraio.status())


@contextmanager
def first_in_line() -> Iterator[None]:
    """Let this process's threads, and processes that they start, run before others, where the system allows it."""
    threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
    policies = {}
    for thread in threads:
        with suppress(OSError):
            policies[thread] = os.sched_getscheduler(thread)
            os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        for thread, policy in policies.items():
            with suppress(OSError):
                os.sched_setscheduler(thread, policy, os.sched_param(0))
