"""Llamas at full size on an emulated GPU: teraio beside other ways to need less memory, by eager operators, in one run.

PyTorch, its allocator and all Python are real; the device, its links and updates on the host's processor take the time that the
machine's description says (`tools/made_up_cuda/emulated`). The device has the memory that the budget allows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.alone import append
from benchmarks.results import Figure
from benchmarks.rival_training import RivalSetting
from examples.llama import SIZES
from examples.training import Report, Step
from examples.worker import EXACT_MEMORY, Worker, WorkerFailed
from planner import Plan
from planner.errors import TeraioError
from teraio.capturing.hardware import MachineDescription

MACHINES = ("h100", "rtx4090")
DEFAULT_SIZES = ("llama-3.2-1b", "llama-3.2-3b", "llama-3-8b")
PERCENTS = (50, 30, 70)
WAYS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "teraio, host": {"backend": "teraio"},
        "teraio, host and storage": {"backend": "teraio"},
        "eager": {},
        "checkpointing": {"checkpointed": True},
        "save_on_cpu": {"save_on_cpu": True},
        "FSDP2, CPUOffloadPolicy": {"way": "fsdp2", "collectives": "fake"},
        "torchao, CPUOffloadOptimizer": {"way": "torchao"},
        "FSDP2, CPUOffloadPolicy, checkpointing": {"way": "fsdp2", "collectives": "fake", "checkpointed": True},
        "torchao, CPUOffloadOptimizer, checkpointing": {"way": "torchao", "checkpointed": True},
        "DeepSpeed, ZeRO-Offload": {"way": "zero_offload"},
    }
)
"""By name, in the order of the runs. Those that are no teraio do not know a budget: each runs if it fits."""
PROGRAM = "benchmarks.emulated_training"
_MEMORY = 400_000_000_000
"""Of a device without a budget."""
_PATIENCE_SECONDS = 600.0
_WARM_STEPS = 60
_SETTLED = 10  # iterations by a plan for which none was made: the allocator has found its places
_MOMENT_SECONDS = 0.1
_GROUPS = 3
_GROUP_SECONDS = 2.0
TRAININGS = "emulated.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """What runs. Empty: all. batch, context: of each step. limit_seconds: of each training."""

    output: Path
    machines: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    percents: tuple[int, ...] = ()
    ways: tuple[str, ...] = ()
    batch: int = 4
    context: int = 2048
    limit_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A training. steps: groups of iterations."""

    steps: list[Step]
    report: Report
    plan: Plan | None = None

    @property
    def seconds(self) -> float:
        """Of an iteration, in the fastest group: another process can only slow it down."""
        return min(step.seconds for step in self.steps)

    @property
    def emulated(self) -> dict[str, float]:
        return (self.report.status or {})["emulated"]  # type: ignore[no-any-return]


def measure(what: Emulation) -> tuple[tuple[Figure, ...], dict[str, list[float]]]:
    """Return all figures, and the seconds of an iteration in each group."""
    from tools.made_up_cuda.build import BuildError
    from tools.made_up_cuda.emulated.build import build

    try:
        folder = build()
        sys.path.append(str(folder / "site"))  # for the version of teraio, where it is not installed
    except BuildError as error:
        raise TeraioError(f"no emulated GPU: {error}") from error
    figures: list[Figure] = []
    samples: dict[str, list[float]] = {}
    for machine in what.machines or MACHINES:
        for size in what.sizes or DEFAULT_SIZES:
            figures += _of_size(what, folder, machine, size, samples)
    return tuple(figures), samples


def _of_size(what: Emulation, folder: Path, machine: str, size: str, samples: dict[str, list[float]]) -> Iterator[Figure]:
    description = MachineDescription.load(machine)
    title = f"emulated {description.hardware.name}, {size}"

    def run(name: str, way: Mapping[str, Any], budget: int | None, **options: Any) -> Ran | str:
        outcome = _trained(what, folder, description, machine, size, f"{title}, {name}", way, budget, options)
        if isinstance(outcome, Ran):
            samples[f"{title}, {name}"] = [step.seconds for step in outcome.steps]
        return outcome

    base = run("eager without a budget", {}, None)
    if isinstance(base, str):
        yield Figure(name=f"{title}, eager without a budget", value=None, unit="s", note=base)
        return
    peak = int(base.report.peak_bytes)
    yield from _figures(f"{title}, eager without a budget", base, base, None)
    for percent in what.percents or PERCENTS:
        budget = peak * percent // 100
        for name, way in WAYS.items():
            if what.ways and name not in what.ways:
                continue
            label, on_teraio = f"{percent} %, {name}", way.get("backend") == "teraio"
            options = _options(description, budget, peak, "storage" in name, what.output) if on_teraio else {}
            yield from _figures(f"{title}, {label}", run(label, way, budget, **options), base, budget)


def _options(description: MachineDescription, budget: int, peak: int, drives: bool, folder: Path) -> dict[str, Any]:
    """Return teraio's options. The host tier alone holds the whole training if the machine can; beside drives, a quarter."""
    host = peak // 4 if drives else peak * 5 // 4
    options: dict[str, Any] = {"codegen": "eager", "memory_budget": budget}
    options["host_budget"] = min(host, (description.hardware.host_memory_bytes or host) * 3 // 4)
    if drives:
        options["storage"] = str(folder)
    return options


def _trained(
    what: Emulation,
    folder: Path,
    description: MachineDescription,
    machine: str,
    size: str,
    name: str,
    way: Mapping[str, Any],
    budget: int | None,
    options: dict[str, Any],
) -> Ran | str:
    """Train in a process of its own. Returns why there is no result if it fails."""
    from tools.made_up_cuda.emulated.build import environment

    gpu = description.gpu
    if gpu is None:
        return f"{machine} describes no GPU"
    surroundings = environment(
        folder,
        machine,
        capability=gpu.capability,
        multiprocessors=gpu.multiprocessors,
        device_bytes=_MEMORY,
        host_bytes=description.hardware.host_memory_bytes or _MEMORY,
    )
    file = "".join(letter if letter.isalnum() else "-" for letter in name)
    plan = what.output / f"{file}-plan.json"
    plan.unlink(missing_ok=True)
    setting = _setting(what, size, way, budget, {**options, "plan_out": str(plan)} if options else {})
    try:
        ran = _run(setting, what.output / f"{file}.log", {**EXACT_MEMORY, **surroundings}, what.limit_seconds)
    except WorkerFailed as failure:
        append(what.output / TRAININGS, {"training": name, "missing": failure.reason})
        return failure.reason
    if plan.exists():
        ran = replace(ran, plan=Plan.load(plan))
    append(what.output / TRAININGS, {"training": name, "seconds": ran.seconds, "report": ran.report.model_dump(mode="json")})
    return ran


def _setting(what: Emulation, size: str, way: Mapping[str, Any], budget: int | None, options: dict[str, Any]) -> RivalSetting:
    fields = {name: value for name, value in way.items() if name != "checkpointed"}
    layers = SIZES[size].layers if way.get("checkpointed") else 0
    shape = SIZES[size].__class__(**{**_fields(size), "context": what.context, "checkpointed_layers": layers})
    on_teraio = fields.get("backend") == "teraio"
    return RivalSetting.model_validate(
        {
            "way": "plain",
            "backend": "eager",
            "model": shape,
            "batch": what.batch,
            "device": "cuda",
            "dtype": "bfloat16",
            "budget_bytes": None if on_teraio else budget,
            "folder": str(what.output),
            "options": options,
            **fields,
        }
    )


def _fields(size: str) -> dict[str, Any]:
    return {name: getattr(SIZES[size], name) for name in SIZES[size].__dataclass_fields__}


def _run(setting: RivalSetting, log: Path, surroundings: Mapping[str, str], limit_seconds: float | None) -> Ran:
    with Worker(setting, log, surroundings, _PATIENCE_SECONDS, PROGRAM, limit_seconds) as worker:
        step = worker.step()
        followed = 0
        for _ in range(_WARM_STEPS if setting.backend == "teraio" else 3):
            step = worker.step()
            began = time.perf_counter()
            worker.wait_for_plan()
            none_made = time.perf_counter() - began < _MOMENT_SECONDS
            followed = followed + 1 if step.phase == "planned" and none_made else 0
            if followed == _SETTLED:
                break
        worker.reset_peak()
        count = max(1, round(_GROUP_SECONDS / step.seconds))
        return Ran(steps=[worker.steps(count) for _ in range(_GROUPS)], report=worker.finish())


def _figures(name: str, outcome: Ran | str, base: Ran, budget: int | None) -> Iterator[Figure]:
    if isinstance(outcome, str):
        yield Figure(name=name, value=None, unit="s", note=outcome)
        return
    status, found = outcome.report.status or {}, outcome.emulated
    notes = [
        status.get("phase", ""),
        f"{base.seconds / outcome.seconds:.3f} of the unconstrained speed",
        f"{found['retries']:.2g} retries",
        f"GPU waits {1e3 * found['awaited_copies']:.1f} ms for copies, "
        f"{1e3 * found['awaited_host']:.1f} ms while the host waits, "
        f"{1e3 * found['awaited_python']:.1f} ms for Python",
        f"threads wait {1e3 * found['waited_for_processor']:.1f} ms for a processor",
        f"{found['collections']:.0f} full collections, {1e3 * found['collect_seconds']:.2f} ms an iteration",
    ]
    yield Figure(name=name, value=outcome.seconds, unit="s", note="; ".join(filter(None, notes)))
    if budget is not None:
        reserved = f"{found['reserved'] / 1e9:.2f} of {budget / 1e9:.2f} GB"
        yield Figure(name=f"{name}: reserved / budget", value=found["reserved"] / budget, unit="", aim="<= 1", note=reserved)
    predicted = outcome.plan and outcome.plan.predicted
    if predicted:
        note = f"predicted {predicted.iteration_seconds:.4g} s, bound {predicted.lower_bound_seconds:.4g} s"
        shares = (
            ("measured / predicted", outcome.seconds / predicted.iteration_seconds, "<= 1.03"),
            ("bound / measured", predicted.lower_bound_seconds / outcome.seconds, ">= 0.95"),
        )
        for what, value, aim in shares:
            yield Figure(name=f"{name}: {what}", value=value, unit="", aim=aim, note=note)
