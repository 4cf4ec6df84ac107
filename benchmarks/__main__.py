"""The command line: `python -m benchmarks [part ...]`. Without a part, it runs those in DEFAULT for the device."""

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console

from benchmarks import (
    budgets,
    checks,
    compile_time,
    emulated,
    engine,
    gpu_bubble,
    gpu_budgets,
    gpu_headline,
    gpu_links,
    gpu_optimizer,
    gpu_overhead,
    host_cost,
    larger,
    lengths,
    optimizer,
    planner,
    planner_chains,
    planner_policies,
    planner_recompute,
    rank_optimizer,
    recompute,
    rivals,
    stage_overhead,
    tiles,
    warm_start,
)
from benchmarks.alone import LlamaScale, Runner, append
from benchmarks.emulated import Emulation
from benchmarks.optimizer import LossesDiffer
from benchmarks.planner_cases import Selection
from benchmarks.planning import PlanningFailed
from benchmarks.results import Figure, Result, save, table
from benchmarks.turns import Scale
from examples.llama import SIZES
from examples.training import DataType
from examples.worker import ROOT, WorkerFailed
from planner.errors import TeraioError
from planner.policies import POLICIES

Measured = tuple[tuple[Figure, ...], dict[str, list[float]]]

DEFAULT = {
    "cpu": ("stage_overhead", "host_cost", "budget_sweep", "rss", "prediction", "optimizer", "compile_time", "engine"),
    "cuda": ("gpu_headline", "gpu_overhead", "gpu_optimizer", "gpu_budgets", "gpu_links", "gpu_bubble"),
}
"""In the order of the runs: where time is short, what comes first matters most. The parts of the planner take minutes to an
hour, so they run only if they are named."""
MINUTES_EACH = 2.5
"""On a GPU, unless the command says otherwise. A training needs about one minute, most of it to compile."""
SELECTED = ("planner_policies", "planner_bound")
"""Parts for which traces can be chosen."""
FIGURES = "figures.jsonl"
"""The file in the output folder to which each part is appended, as one line."""


def parts(scale: Scale, selection: Selection, emulation: Emulation) -> dict[str, Callable[[], Measured]]:
    """Return all parts that train no Llama, by name. Those about budgets share one run."""
    sweep = cache(budgets.sweep)
    return {
        "stage_overhead": lambda: stage_overhead.measure(scale),
        "host_cost": lambda: host_cost.measure(scale.rounds),
        "budget_sweep": lambda: (budgets.throughput(sweep(scale)), sweep(scale).seconds),
        "rss": lambda: (budgets.resident_set(sweep(scale)), {}),
        "prediction": lambda: (budgets.prediction(sweep(scale)), {}),
        "optimizer": lambda: optimizer.measure(scale),
        "rank_optimizer_zero": lambda: rank_optimizer.measure(scale, "zero"),
        "rank_optimizer_fsdp": lambda: rank_optimizer.measure(scale, "fsdp"),
        "recompute": lambda: recompute.measure(scale),
        "checks": lambda: checks.measure(scale),
        "compile_time": lambda: compile_time.measure(scale),
        "engine": lambda: engine.measure(scale),
        "warm_start": lambda: warm_start.measure(scale),
        "larger": lambda: larger.measure(scale),
        "lengths": lambda: lengths.measure(scale),
        "tiles": lambda: tiles.measure(scale),
        "planner": lambda: planner.measure(scale),
        "planner_policies": lambda: planner_policies.measure(selection),
        "planner_bound": lambda: planner_policies.measure_best(selection),
        "planner_recompute": lambda: planner_recompute.measure(scale),
        "planner_chains": lambda: planner_chains.measure(scale),
        "emulated": lambda: emulated.measure(emulation),
    }


def llama_parts(runner: Runner) -> dict[str, Callable[[], Measured]]:
    """Return all parts about Llamas, by name. They share trainings."""
    return {
        "gpu_headline": lambda: (gpu_headline.measure(runner), runner.samples),
        "gpu_overhead": lambda: (gpu_overhead.measure(runner), runner.samples),
        "gpu_optimizer": lambda: (gpu_optimizer.measure(runner), runner.samples),
        "gpu_budgets": lambda: (gpu_budgets.measure(runner), runner.samples),
        "gpu_links": lambda: gpu_links.measure(runner),
        "gpu_bubble": lambda: (gpu_bubble.measure(runner), runner.samples),
        "rivals": lambda: (rivals.measure(runner), runner.samples),
    }


def scale_for(device: str, output: Path, rounds: int) -> Scale:
    """Return sizes with which all parts take about a quarter of an hour on two cores, or on one GPU."""
    if device == "cuda":
        return Scale(
            device=device,
            layers=24,
            width=2048,
            heads=16,
            context=1024,
            batch=16,
            rounds=rounds,
            output=output,
        )
    return Scale(device=device, layers=6, width=384, heads=6, context=512, batch=8, rounds=rounds, output=output)


def llama_scale_for(
    device: str,
    output: Path,
    rounds: int,
    *,
    sizes: list[str],
    dtype: str | None,
    minutes: float,
    each: float | None = None,
    **shape: int | None,
) -> LlamaScale:
    """Return a scale whose rows fill a GPU, or are small on CPU. `shape`: batch and context, None for these defaults."""
    defaults = {"batch": 4, "context": 2048} if device == "cuda" else {"batch": 2, "context": 64}
    return LlamaScale(
        device=device,
        dtype=dtype or ("bfloat16" if device == "cuda" else "float32"),
        sizes=tuple(sizes),
        rounds=rounds,
        limit_seconds=60 * minutes,
        training_seconds=None if each is None else 60 * each,
        output=output,
        batch=shape["batch"] or defaults["batch"],
        context=shape["context"] or defaults["context"],
    )


def one_of(name: str, given: list[str], known: tuple[str, ...]) -> None:
    """Raise typer.BadParameter if one of `given` is not known."""
    if unknown := [each for each in given if each not in known]:
        raise typer.BadParameter(f"no {name} {', '.join(unknown)}; there are {', '.join(known)}")


def settings_of(scale: Scale | LlamaScale | Selection | Emulation) -> dict[str, Any]:
    """Return the settings that the figures depend on, for the file."""
    return {"scale": {name: str(value) for name, value in dataclasses.asdict(scale).items() if name != "output"}}


def main(
    chosen: Annotated[list[str] | None, typer.Argument(help="Default: the usual parts for the device.", metavar="PART")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    rounds: Annotated[int, typer.Option(help="Turns of each variant.", min=1)] = 3,
    output: Annotated[Path, typer.Option(help="Folder for logs and spill files.")] = ROOT / "benchmarks" / "out",
    results: Annotated[Path, typer.Option(help="Folder for the JSON file.")] = ROOT / "benchmarks" / "results",
    size: Annotated[list[str] | None, typer.Option(help=f"Llamas, for gpu_...: {', '.join(SIZES)}. May be repeated.")] = None,
    batch: Annotated[int | None, typer.Option(help="Rows, for gpu_...", min=1)] = None,
    context: Annotated[int | None, typer.Option(help="Tokens in a row, for gpu_...", min=1)] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16, for gpu_...")] = None,
    minutes: Annotated[float, typer.Option(help="Time after which gpu_... starts no more trainings.", min=0)] = 7.5,
    each: Annotated[float | None, typer.Option(help="Minutes after which a training of gpu_... is stopped.", min=0)] = None,
    trace: Annotated[list[str] | None, typer.Option(help=f"Traces, for {' and '.join(SELECTED)}. May be repeated.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Policies, for planner_policies. May be repeated.")] = None,
    machine: Annotated[
        list[str] | None, typer.Option(help=f"Described GPUs, for emulated; default: {', '.join(emulated.MACHINES)}.")
    ] = None,
    percent: Annotated[list[int] | None, typer.Option(help="Budgets, in % of the peak without one, for emulated.")] = None,
    way: Annotated[list[str] | None, typer.Option(help=f"For emulated: {', '.join(emulated.WAYS)}. May be repeated.")] = None,
    processes: Annotated[int, typer.Option(help=f"Cases planned at the same time, for {' and '.join(SELECTED)}.", min=1)] = 1,
) -> None:
    """Measure teraio, print a table and write a JSON file. Exit status 1 if a part could not be measured."""
    os.environ.setdefault("TERAIO_PLAN_CACHE", "off")  # trainings that are compared do not find each other's plans
    console = Console() if sys.stdout.isatty() else Console(width=150)
    one_of("device", [device], tuple(DEFAULT))
    one_of("size", size or [], tuple(SIZES))
    one_of("policy", policy or [], tuple(POLICIES))
    one_of("dtype", [dtype] if dtype else [], get_args(DataType))
    scale = scale_for(device, output.resolve(), rounds)
    llamas = llama_scale_for(
        device,
        output.resolve(),
        rounds,
        sizes=size or [],
        dtype=dtype,
        minutes=minutes,
        each=each if each is not None or device == "cpu" else MINUTES_EACH,
        batch=batch,
        context=context,
    )
    selection = Selection(output=output.resolve(), traces=tuple(trace or ()), policies=tuple(policy or ()), processes=processes)
    one_of("way", way or [], tuple(emulated.WAYS))
    emulation = Emulation(
        output=output.resolve(),
        machines=tuple(machine or ()),
        sizes=tuple(size or ()),
        percents=tuple(percent or ()),
        ways=tuple(way or ()),
        batch=batch or 4,
        context=context or 2048,
        limit_seconds=None if each is None else 60 * each,
    )
    known, trained = parts(scale, selection, emulation), llama_parts(Runner(llamas))
    one_of("part", chosen or [], (*known, *trained))
    output.mkdir(parents=True, exist_ok=True)
    found, failed = [], False
    for name in chosen or DEFAULT[device]:
        started = time.perf_counter()
        console.print(f"measuring {name} ...", highlight=False)
        try:
            figures, samples = (known | trained)[name]()
        except (WorkerFailed, PlanningFailed, LossesDiffer, TeraioError) as failure:
            console.print(str(failure), style="red", markup=False, highlight=False)
            failed = True
            continue
        of_part = llamas if name in trained else selection if name in SELECTED else emulation if name == "emulated" else scale
        settings = settings_of(of_part)
        seconds = time.perf_counter() - started
        found.append(Result(part=name, seconds=seconds, figures=figures, samples=samples, settings=settings))
        append(output / FIGURES, found[-1].model_dump(exclude={"samples"}))
    console.print(table(found))
    if found:
        path = save(found, results, device)
        console.print(f"written to {os.path.relpath(path)}", highlight=False)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
