"""The command line: `python -m benchmarks [part ...]`; without a part, all but those in ON_REQUEST."""

import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import budgets, compile_time, engine, planner, planner_policies, stage_overhead
from benchmarks.planning import PlanningFailed
from benchmarks.results import Figure, Result, save, table
from benchmarks.turns import Scale
from examples.worker import ROOT, WorkerFailed
from planner.errors import TeraioError

Measured = tuple[tuple[Figure, ...], dict[str, list[float]]]

ON_REQUEST = frozenset({"planner", "planner_policies"})
"""Parts that take minutes, or about an hour, and run only when they are named."""


def parts() -> dict[str, Callable[[Scale], Measured]]:
    """Every part by name; those about budgets share one run."""
    sweep = cache(budgets.sweep)
    return {
        "stage_overhead": stage_overhead.measure,
        "budget_sweep": lambda scale: (budgets.throughput(sweep(scale)), sweep(scale).seconds),
        "rss": lambda scale: (budgets.resident_set(sweep(scale)), {}),
        "prediction": lambda scale: (budgets.prediction(sweep(scale)), {}),
        "compile_time": compile_time.measure,
        "engine": engine.measure,
        "planner": planner.measure,
        "planner_policies": planner_policies.measure,
    }


def scale_for(device: str, output: Path, rounds: int) -> Scale:
    """Sizes that keep all parts together within about twelve minutes on two cores, or on one GPU."""
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
    return Scale(
        device=device, layers=6, width=384, heads=6, context=512, batch=8, rounds=rounds, output=output
    )


def main(
    chosen: Annotated[list[str] | None, typer.Argument(help="If none: all but the planner's.", metavar="PART")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    rounds: Annotated[int, typer.Option(help="Turns of each variant.", min=1)] = 3,
    output: Annotated[Path, typer.Option(help="For logs and spill files.")] = ROOT / "benchmarks" / "out",
    results: Annotated[Path, typer.Option(help="For the JSON file.")] = ROOT / "benchmarks" / "results",
) -> None:
    """Measure teraio; print a table and write a JSON file. Status 1 if a part could not be measured."""
    console = Console() if sys.stdout.isatty() else Console(width=150)
    known = parts()
    if unknown := [name for name in chosen or [] if name not in known]:
        raise typer.BadParameter(f"no part {', '.join(unknown)}; there are {', '.join(known)}")
    output.mkdir(parents=True, exist_ok=True)
    scale = scale_for(device, output.resolve(), rounds)
    found, failed = [], False
    for name in chosen or [name for name in known if name not in ON_REQUEST]:
        started = time.perf_counter()
        console.print(f"measuring {name} ...", highlight=False)
        try:
            figures, samples = known[name](scale)
        except (WorkerFailed, PlanningFailed, TeraioError) as failure:
            console.print(str(failure), style="red", markup=False, highlight=False)
            failed = True
            continue
        sizes = {field: str(getattr(scale, field)) for field in Scale.__dataclass_fields__ if field != "output"}
        settings = {"scale": sizes}
        seconds = time.perf_counter() - started
        found.append(Result(part=name, seconds=seconds, figures=figures, samples=samples, settings=settings))
    console.print(table(found))
    if found:
        path = save(found, results, device)
        console.print(f"written to {os.path.relpath(path)}", highlight=False)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
