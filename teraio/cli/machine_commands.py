"""The commands about machines: what a step would need of one (capture), what would help (advise), what this one has (doctor)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import planner
from planner.problem import SolverSettings
from planner.schema import write_atomic
from teraio.advice import Case
from teraio.advice import advise as advice_of
from teraio.cli import arguments
from teraio.cli.advice_tables import advice_tables
from teraio.cli.arguments import AsJson, Device, Host, Rows, Storage, TraceFile, with_solver_options
from teraio.cli.capture import captured
from teraio.cli.doctor import doctor_tables, examined
from teraio.cli.output import save, show_or_print
from teraio.cli.trace_summary import summarise_trace
from teraio.cli.trace_tables import trace_tables
from teraio.options import require_directory


def capture(
    target: Annotated[
        str,
        typer.Argument(metavar="MODULE:FUNCTION", help="A function that makes a training and returns a function for one step."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the trace.")],
    hardware: Annotated[
        str, typer.Option(help="A known machine (h100, h200, a100, rtx4090, rtx5090, laptop) or a file that describes one.")
    ] = "h100",
    name: Annotated[str | None, typer.Option(help="Name of the trace.", show_default="that of the function")] = None,
    subgroup: Annotated[
        str | None, typer.Option(help="How much of the optimizer is updated at once, such as 256MiB.", show_default="chosen")
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="A trace measured on the machine, of a training of a smaller size: times are fitted to it."),
    ] = None,
    smaller: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="The training of that trace.", show_default="the one that is captured"),
    ] = None,
    as_json: AsJson = False,
    rows: Rows = 10,
) -> None:
    """Capture a training step for a machine without running it: no memory, no GPU. Needs torch."""
    require_directory("--output", output.parent)
    size = None if subgroup is None else arguments.size("--subgroup", subgroup)
    with Console(stderr=True).status("capturing"):
        trace = captured(target, hardware, name, size, calibrate, smaller)
    save(trace, output)
    summary = summarise_trace(trace)
    show_or_print(summary, trace_tables(summary, rows), as_json=as_json)


@with_solver_options
def advise(
    trace: TraceFile,
    device: Device,
    host: Host = None,
    storage: Storage = None,
    drives: Annotated[int, typer.Option(min=1, help="Number of drives behind the storage tier of the trace.")] = 1,
    tbw: Annotated[str | None, typer.Option(help="Rated bytes written of each drive (TBW), such as 600TB.")] = None,
    plans: Annotated[Path | None, typer.Option(help="Directory for the traces and plans behind each line.")] = None,
    as_json: AsJson = False,
    *,
    settings: SolverSettings,
) -> None:
    """Say whether TRACE fits, how fast it is, what holds it up, and what would change that: more memory, one more drive, a larger
    batch, more accumulation, smaller states. Exit code 1 if it does not fit."""
    if plans is not None:
        require_directory("--plans", plans)
    loaded = planner.Trace.load(trace)

    def keep(case: Case, made: planner.Plan) -> None:
        if plans is not None:
            name = case.what.replace(" ", "-").replace("%", "")
            save(case.trace, plans / f"{name}.trace.json")
            save(made, plans / f"{name}.plan.json")

    with Console(stderr=True).status("planning") as status:
        found = advice_of(
            loaded,
            arguments.budgets(arguments.size("--device", device), host, storage),
            drives=drives,
            rated_bytes=None if tbw is None else arguments.size("--tbw", tbw),
            settings=settings,
            progress=status.update,
            made=keep,
        )
    show_or_print(found, advice_tables(found), as_json=as_json)
    if found.answers[0].predicted is None:
        raise typer.Exit(1)


def doctor(
    storage: Annotated[list[Path] | None, typer.Option(help="A directory for spill files. May be repeated.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.", show_default="cuda where there is a GPU")] = "",
    hardware_out: Annotated[
        Path | None, typer.Option(help="Where to write a description of this machine, for capture. Measures for half a minute.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look at this machine: software, memory, drives. Says what is missing or slow, what follows, and what to do. Needs torch.
    Exit code 1 if something is missing."""
    if hardware_out is not None:
        require_directory("--hardware-out", hardware_out.parent)
    with Console(stderr=True).status("looking at this machine"):
        found, described = examined(storage or [], device, describe=hardware_out is not None)
    if hardware_out is not None and described is not None:
        write_atomic(hardware_out, described.model_dump_json(by_alias=True, indent=1) + "\n")
    show_or_print(found, doctor_tables(found), as_json=as_json)
    if not found.healthy:
        raise typer.Exit(1)
