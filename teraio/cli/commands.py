"""The commands: make, replay and read plans. Only `capture` and `doctor` need torch, so plans can be made on another machine.

Exit codes: 0 success; 1 a file or a budget is not usable; 2 wrong usage. An error is one line on standard error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

import planner
from planner.errors import FileFormatError
from planner.policies import POLICIES
from planner.problem import SolverSettings
from planner.schema import FrozenModel, printable, read_format, write_atomic
from teraio import __version__
from teraio.advice import Case
from teraio.advice import advise as advice_of
from teraio.cli import arguments
from teraio.cli.advice_tables import advice_tables
from teraio.cli.arguments import (
    AsJson,
    Device,
    Host,
    NodeFile,
    Policy,
    Ranks,
    Rows,
    Shared,
    Storage,
    TraceAndPlan,
    TraceFile,
    TraceFiles,
    with_solver_options,
)
from teraio.cli.capture import captured
from teraio.cli.comparison import compare_policies, sweep_budgets
from teraio.cli.comparison_tables import comparison_tables, sweep_tables
from teraio.cli.doctor import doctor_tables, examined
from teraio.cli.node_summary import summarise_node, summarise_node_replay
from teraio.cli.node_tables import node_replay_tables, node_tables
from teraio.cli.plan_summary import summarise_plan
from teraio.cli.plan_tables import plan_tables, replay_tables
from teraio.cli.ranks import RankFiles, plan_paths
from teraio.cli.replay_summary import summarise_replay
from teraio.cli.report.command import report
from teraio.cli.tables import Page, show, write_out
from teraio.cli.trace_summary import summarise_trace
from teraio.cli.trace_tables import trace_tables
from teraio.options import require_directory

app = typer.Typer(
    name="teraio",
    help="Make, replay and read the plans by which teraio moves blocks between device, host and storage.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

MAX_MESSAGE_CHARACTERS = 2000

FORMATS: dict[str, type[planner.Trace] | type[planner.Plan]] = {
    "teraio.trace": planner.Trace,
    "teraio.plan": planner.Plan,
}
SCHEMAS: dict[str, type[FrozenModel]] = {"trace": planner.Trace, "plan": planner.Plan, "node": planner.Node}


class FileKind(StrEnum):
    """The file formats."""

    TRACE = "trace"
    PLAN = "plan"
    NODE = "node"


def main() -> NoReturn:
    """Run the command in `sys.argv` and exit with its code."""
    try:
        app()
    except planner.OptionsError as error:
        _fail(str(error), code=2)
    except planner.TeraioError as error:
        _fail(str(error), code=1)
    sys.exit(0)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"teraio {__version__}")
        raise typer.Exit


@app.callback()
def _teraio(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
@with_solver_options
def plan(
    traces: TraceFiles,
    device: Device,
    host: Host = None,
    storage: Storage = None,
    policy: Policy = "ilp",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to write the plan. With --ranks, a name with {rank} if they differ."),
    ] = None,
    ranks: Ranks = False,
    node: NodeFile = None,
    shared: Shared = None,
    as_json: AsJson = False,
    rows: Rows = 10,
    *,
    settings: SolverSettings,
) -> None:
    """Make a plan for TRACE under the budgets and show it. --json prints the plan itself. With --ranks, plan the ranks of a
    machine together; budgets are those of each rank."""
    budgets = arguments.budgets(arguments.size("--device", device), host, storage)
    if output is not None:
        require_directory("--output", output.parent)
    if ranks:
        _plan_ranks(RankFiles.read(traces, node, shared or ()), budgets, policy, output, settings, as_json=as_json)
        return
    loaded = planner.Trace.load(*arguments.only("TRACE", traces, node, shared))
    with Console(stderr=True).status("planning"):
        made = planner.plan(loaded, budgets, policy=policy, **asdict(settings))
    if output is not None:
        _save(made, output)
    _show(made, plan_tables(summarise_plan(made, loaded), rows), as_json=as_json)


@app.command()
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
    _save(trace, output)
    summary = summarise_trace(trace)
    _show(summary, trace_tables(summary, rows), as_json=as_json)


@app.command()
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
            _save(case.trace, plans / f"{name}.trace.json")
            _save(made, plans / f"{name}.plan.json")

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
    _show(found, advice_tables(found), as_json=as_json)
    if found.answers[0].predicted is None:
        raise typer.Exit(1)


def _plan_ranks(
    files: RankFiles,
    budgets: planner.Budgets,
    policy: str,
    output: Path | None,
    settings: SolverSettings,
    *,
    as_json: bool,
) -> None:
    files.refuse_plans()
    plan_paths(output, files.traces)  # refuses before the planning

    def make(trace: planner.Trace, each: planner.Budgets, known: Sequence[planner.Plan]) -> planner.Plan:
        return planner.plan(trace, each, policy=policy, incumbents=known, **asdict(settings))

    with Console(stderr=True).status("planning") as status:
        found = planner.plan_node(files.node, files.traces, [budgets] * files.node.ranks, make=make, progress=status.update)
    for path, made in zip(plan_paths(output, files.traces), found.plans, strict=False):
        _save(made, path)
    summary = summarise_node_replay(files.node, files.traces, found.plans, found.timeline, found)
    _show(summary, node_replay_tables(summary), as_json=as_json)


@app.command()
def simulate(
    files: TraceAndPlan,
    ranks: Ranks = False,
    node: NodeFile = None,
    shared: Shared = None,
    as_json: AsJson = False,
    rows: Rows = 10,
) -> None:
    """Replay PLAN on TRACE in the simulator. Shows iteration time, stalls, peak memory, the work of each link and of the host's
    processor, and the critical path. With --ranks, replay the plans of the ranks of a machine together."""
    if ranks:
        found = RankFiles.read(files, node, shared or ())
        timeline = planner.simulate_node(found.node, found.traces, found.needed_plans())
        node_summary = summarise_node_replay(found.node, found.traces, found.needed_plans(), timeline)
        _show(node_summary, node_replay_tables(node_summary), as_json=as_json)
        return
    trace, plan = arguments.only("TRACE PLAN", files, node, shared)
    loaded, decided = planner.Trace.load(trace), planner.Plan.load(plan)
    summary = summarise_replay(loaded, decided, planner.simulate(loaded, decided))
    _show(summary, replay_tables(summary, rows), as_json=as_json)


@app.command()
@with_solver_options
def compare(
    trace: TraceFile,
    device: Device,
    host: Host = None,
    storage: Storage = None,
    policy: Annotated[list[str] | None, typer.Option(help="A policy to compare. May be repeated.", show_default="all")] = None,
    as_json: AsJson = False,
    *,
    settings: SolverSettings,
) -> None:
    """Plan TRACE with every policy under the same budgets. Shows how long each waits, and a bound that no plan can beat."""
    budgets = arguments.budgets(arguments.size("--device", device), host, storage)
    loaded = planner.Trace.load(trace)
    with Console(stderr=True).status("planning") as status:
        found = compare_policies(loaded, budgets, policy or list(POLICIES), settings=settings, progress=status.update)
    if all(verdict.predicted is None for verdict in found.verdicts):
        raise planner.TeraioError(f"no policy finds a plan: {found.verdicts[0].error}")
    _show(found, comparison_tables(found), as_json=as_json)


@app.command()
@with_solver_options
def sweep(
    trace: TraceFile,
    device: Annotated[
        str, typer.Option(metavar="LOWEST:HIGHEST:COUNT", help="Device budgets at equal distances, such as 8GiB:80GiB:10.")
    ],
    host: Host = None,
    storage: Storage = None,
    policy: Policy = "ilp",
    as_json: AsJson = False,
    *,
    settings: SolverSettings,
) -> None:
    """Plan TRACE for a range of device budgets. Shows the iteration time for each."""
    sizes = arguments.size_range(device)
    loaded = planner.Trace.load(trace)
    with Console(stderr=True).status("planning") as status:
        found = sweep_budgets(
            loaded,
            sizes,
            arguments.budgets(sizes[0], host, storage),
            policy,
            settings=settings,
            progress=status.update,
        )
    if found.points[-1].predicted is None:
        raise planner.TeraioError(f"no budget of the range suffices: {found.points[-1].error}")
    _show(found, sweep_tables(found), as_json=as_json)


@app.command()
def inspect(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="A trace or a plan. With --ranks, the traces of all ranks.")
    ],
    trace: Annotated[Path | None, typer.Option(help="The trace of the plan, for names, sizes and stalls.")] = None,
    tbw: Annotated[
        str | None,
        typer.Option(help="Rated bytes written of the drives (TBW), such as 600TB. Shows how long they last."),
    ] = None,
    ranks: Ranks = False,
    node: NodeFile = None,
    shared: Shared = None,
    as_json: AsJson = False,
    rows: Rows = 10,
) -> None:
    """Show what a trace or a plan contains. A trace: stages, memory over time, idle blocks, updates that can run on the host, the
    smallest budget. A plan: moves, updates on the host, predictions; with --trace also why each block moves and why the iteration
    takes as long as it does. With --ranks: the traces of a machine's ranks side by side, and what they share."""
    if ranks:
        if trace is not None or tbw is not None:
            raise planner.OptionsError("options --trace and --tbw are for one plan: leave them out, or leave --ranks out")
        found = RankFiles.read(files, node, shared or ())
        found.refuse_plans()
        node_summary = summarise_node(found.node, found.traces)
        _show(node_summary, node_tables(node_summary), as_json=as_json)
        return
    (file,) = arguments.only("FILE", files, node, shared)
    loaded = _load(file)
    if isinstance(loaded, planner.Plan):
        plan_summary = summarise_plan(
            loaded,
            None if trace is None else planner.Trace.load(trace),
            rated_bytes=None if tbw is None else arguments.size("--tbw", tbw),
        )
        _show(plan_summary, plan_tables(plan_summary, rows), as_json=as_json)
        return
    if trace is not None:
        raise planner.OptionsError(f"option --trace: {file} is a trace itself; leave the option out")
    if tbw is not None:
        raise planner.OptionsError(f"option --tbw: {file} is a trace; only a plan tells what is written")
    trace_summary = summarise_trace(loaded)
    _show(trace_summary, trace_tables(trace_summary, rows), as_json=as_json)


app.command()(with_solver_options(report))


@app.command()
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
    _show(found, doctor_tables(found), as_json=as_json)
    if not found.healthy:
        raise typer.Exit(1)


@app.command()
def schema(kind: Annotated[FileKind, typer.Argument(help="The file format.")]) -> None:
    """Print the JSON Schema of a file format."""
    write_out(json.dumps(SCHEMAS[kind.value].model_json_schema(), indent=1))


def _load(path: Path) -> planner.Trace | planner.Plan:
    """Return the trace or plan in a file. Raises FileFormatError if it is neither or is damaged."""
    found = read_format(path)
    if found is None or found not in FORMATS:
        shown = repr(found and printable(found, most=60))
        raise FileFormatError(f"{path}: field 'format' is {shown}; this command takes {' and '.join(map(repr, FORMATS))} only")
    return FORMATS[found].load(path)


def _save(made: planner.Plan | planner.Trace, path: Path) -> None:
    try:
        made.save(path)
    except OSError as error:
        raise planner.TeraioError(f"{path}: cannot be written: {error.strerror}") from error


def _show(model: FrozenModel, page: Page, *, as_json: bool) -> None:
    if as_json:
        write_out(json.dumps(model.model_dump(mode="json", by_alias=True), indent=1))
    else:
        show(page)


def _fail(message: str, *, code: int) -> NoReturn:
    line = printable(" ".join(message.split()), most=MAX_MESSAGE_CHARACTERS)  # it may quote names from a file
    print(f"teraio: {line}", file=sys.stderr)
    sys.exit(code)
