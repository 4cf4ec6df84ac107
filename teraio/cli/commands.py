"""The command line: its commands, in the order in which the help lists them. Only `capture` and `doctor` need torch, so plans can
be made on another machine.

Exit codes: 0 success; 1 a file or a budget is not usable; 2 wrong usage. An error is one line on standard error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import planner
from planner.errors import FileFormatError, PlanError
from planner.policies import POLICIES
from planner.problem import SolverSettings, live_bytes, without_collections
from planner.schema import printable, read_format, told
from teraio import __version__
from teraio.cli import arguments
from teraio.cli.arguments import AsJson, Device, Host, PlanFile, Policy, Rows, Storage, TraceFile, as_options, with_solver_options
from teraio.cli.lengths import histogram, lengths_facts, lengths_of_plan, lengths_table
from teraio.cli.machine_commands import advise, capture, doctor
from teraio.cli.output import Data, data_of, show_or_print, working, write_file, write_out
from teraio.cli.plan_summary import Progress, plan_page, replay_page, summarise_plan, summarise_replay, sweep_budgets, sweep_page
from teraio.cli.report.content import chrome_trace, draw, report_of, require_matplotlib
from teraio.cli.report.page import html_page
from teraio.cli.trace_summary import summarise_trace, trace_page
from teraio.options import require_directory

FORMATS: dict[str, type[planner.Trace] | type[planner.Plan]] = {"teraio.trace": planner.Trace, "teraio.plan": planner.Plan}
FileKind = StrEnum("FileKind", ["trace", "plan"])  # as the command line names them


@with_solver_options
@without_collections()
def plan(
    trace: TraceFile,
    device: Device,
    host: Host = None,
    storage: Storage = None,
    policy: Policy = "ilp",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the plan.")] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Lengths to thin the plan for, of a trace of varying length: 128,512,2048, or a file with lengths and counts.",
            show_default="some that cover the trace",
        ),
    ] = None,
    as_json: AsJson = False,
    rows: Rows = 10,
    *,
    settings: SolverSettings,
) -> None:
    """Make a plan for TRACE under the budgets and show it.

    It is for the longest inputs; of shorter ones it says what need not move. --json prints the plan itself.
    """
    counts = None if lengths is None else histogram(lengths)
    budgets = arguments.budgets(arguments.size("--device", device), host, storage)
    if output is not None:
        require_directory("--output", output.parent)
    with working("reading the trace") as progress:
        loaded = planner.Trace.load(trace)
        for length in counts or ():
            loaded.at(length)  # before time goes into the plan
        progress("planning")
        made = planner.plan(loaded, budgets, policy=policy, **asdict(settings))
        made = planner.with_shorter(made, loaded, counts)
        if output is not None:
            write_file(output, made.text())
        progress("replaying the plan")
        by_length = lengths_of_plan(made, loaded, counts)
        page = [*plan_page(summarise_plan(made, loaded), rows), *lengths_facts(by_length), lengths_table(by_length)]
    show_or_print(data_of(made), page, as_json=as_json)


def simulate(
    trace: TraceFile,
    plan: PlanFile,
    length: Annotated[int | None, typer.Option(help="Length of the inputs, where it varies.", show_default="the longest")] = None,
    as_json: AsJson = False,
    rows: Rows = 10,
) -> None:
    """Replay PLAN on TRACE in the simulator.

    Shows iteration time, stalls, peak memory, the work of each link and of the host's processor, and the critical path.
    """
    loaded, decided = planner.Trace.load(trace), planner.Plan.load(plan)
    by_length = [] if length is not None else lengths_of_plan(decided, loaded)
    if length is not None:
        planner.simulate(loaded, decided)  # the plan must belong to the trace
        wanted = (length, *(loaded.lengths.highest[1:] if loaded.lengths is not None else ()))
        loaded = loaded.at(length)
        if any(len(each.sizes) != len(wanted) for each in decided.shorter):
            raise PlanError(
                f"the plan knows inputs of {told(decided.shorter[0].sizes)}, which is not what the trace has: {told(wanted)}, "
                "the length and, where that varies too, the number; make a plan from this trace: teraio plan"
            )
        decided = decided.followed(decided.shorter_for(wanted), loaded).model_copy(update={"predicted": None})
    summary = {**summarise_replay(loaded, decided, planner.simulate(loaded, decided)), "lengths": by_length}
    show_or_print(summary, [*replay_page(summary, rows), lengths_table(by_length)], as_json=as_json)


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
    """Plan TRACE for a range of device budgets.

    Shows the iteration time for each.
    """
    sizes = arguments.size_range(device)
    loaded = planner.Trace.load(trace)
    with working("planning") as progress:
        found = sweep_budgets(
            loaded, sizes, arguments.budgets(sizes[0], host, storage), policy, settings=settings, progress=progress
        )
    if found["points"][-1]["predicted"] is None:
        raise planner.TeraioError(f"no budget of the range suffices: {found['points'][-1]['error']}")
    show_or_print(found, sweep_page(found), as_json=as_json)


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace or a plan.")],
    trace: Annotated[Path | None, typer.Option(help="The trace of the plan, for names, sizes and stalls.")] = None,
    as_json: AsJson = False,
    rows: Rows = 10,
) -> None:
    """Show what a trace or a plan contains.

    A trace: stages, idle blocks, updates that can run on the host, the smallest budget. A plan: moves, updates
    on the host, predictions; with --trace also why each block moves and why the iteration takes as long as it does.
    """
    loaded = _load(file)
    if isinstance(loaded, planner.Plan):
        named = None if trace is None else planner.Trace.load(trace)
        by_length = lengths_of_plan(loaded, named)
        found = summarise_plan(loaded, named)
        page = [*plan_page(found, rows), lengths_table(by_length)]
        show_or_print({**found, "lengths": by_length}, page, as_json=as_json)
        return
    if trace is not None:
        raise planner.OptionsError(f"option --trace: {file} is a trace itself; leave the option out")
    found = summarise_trace(loaded)
    show_or_print(found, trace_page(found, rows), as_json=as_json)


@with_solver_options
def report(
    plan: PlanFile,
    trace: Annotated[Path, typer.Option(help="The trace of the plan.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the page (HTML).")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Where to write the timeline for ui.perfetto.dev (JSON).")] = None,
    png: Annotated[Path | None, typer.Option(help="Where to write a picture (PNG). Needs matplotlib.")] = None,
    points: Annotated[int, typer.Option(min=0, max=100, help="Device budgets to plan for the sweep; 0 for no sweep.")] = 8,
    as_json: AsJson = False,
    *,
    settings: SolverSettings,
) -> None:
    """Show PLAN as one page.

    Memory, every copy and why, stalls, idle blocks, and time against budget, which is planned anew.
    """
    outputs = {"--output": output, "--perfetto": perfetto, "--png": png}
    if not as_json and all(path is None for path in outputs.values()):
        raise planner.OptionsError("report: found no place to write to, wanted --output, --perfetto, --png or --json")
    for option, path in outputs.items():
        if path is not None:
            require_directory(option, path.parent)
    if png is not None:
        require_matplotlib()
    needed = points and (as_json or output is not None)
    with working("reading plan and trace") as progress:
        decided, loaded = planner.Plan.load(plan), planner.Trace.load(trace)
        sweep = _sweep(decided, loaded, points, settings, progress) if needed else None
        progress("replaying the plan")
        made = report_of(decided, loaded, sweep=sweep)
        progress("writing")
        if output is not None:
            write_file(output, html_page(made))
        if perfetto is not None:
            write_file(perfetto, json.dumps(chrome_trace(made["facts"])))
        if png is not None:
            draw(made["facts"], png)
    if as_json:
        write_out(json.dumps(made, indent=1))
    for path in outputs.values():
        if path is not None and not as_json:
            write_out(f"written: {path}")


def _sweep(plan: planner.Plan, trace: planner.Trace, points: int, settings: SolverSettings, progress: Progress) -> Data:
    """Plan for budgets from the smallest that works to all that is needed. They are close where memory is scarce."""
    lowest, highest = planner.floor(trace)[0], max(*live_bytes(trace), plan.budgets.device_bytes)
    ratio = highest / max(lowest, 1)
    sizes = {round(lowest * ratio ** (number / max(points - 1, 1))) for number in range(points)}
    policy = plan.policy if plan.policy in POLICIES else "ilp"
    sizes.add(plan.budgets.device_bytes)
    return sweep_budgets(trace, sorted(sizes), plan.budgets, policy, settings=settings, progress=progress)


def schema(kind: Annotated[FileKind, typer.Argument(help="The file format.")]) -> None:
    """Print the JSON Schema of a file format."""
    write_out(json.dumps(FORMATS[f"teraio.{kind}"].model_json_schema(), indent=1))


def _load(path: Path) -> planner.Trace | planner.Plan:
    """Return the trace or plan in a file. Raises FileFormatError if it is neither or is damaged."""
    found = read_format(path)
    if found is None or found not in FORMATS:
        shown = repr(found and printable(found, most=60))
        raise FileFormatError(f"{path}: field 'format' is {shown}; this command takes {' and '.join(map(repr, FORMATS))} only")
    return FORMATS[found].load(path)


# -- the command line

app = typer.Typer(
    name="teraio",
    help="Make, replay and read the plans by which teraio moves blocks between device, host and storage.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

MAX_MESSAGE_CHARACTERS = 2000


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


_COMMANDS: dict[Callable[..., None], str] = {
    plan: "plan trace.json --device 24GiB --host 64GiB -o plan.json",
    capture: "capture module:function --hardware rtx4090 --tokens 8192 -o trace.json",
    advise: "advise trace.json --device 24GB --host 64GB",
    simulate: "simulate trace.json plan.json",
    sweep: "sweep trace.json --device 8GiB:80GiB:10",
    inspect: "inspect plan.json --trace trace.json --rows 30",
    report: "report plan.json --trace trace.json -o report.html",
    doctor: "doctor --storage /mnt/nvme",
    schema: "schema trace",
}
for _command, _example in _COMMANDS.items():
    app.command(epilog=f"Example: teraio {_example}")(_command)


def _fail(message: str, *, code: int) -> NoReturn:
    line = printable(as_options(" ".join(message.split())), most=MAX_MESSAGE_CHARACTERS)  # it may quote names from a file
    print(f"teraio: {line}", file=sys.stderr)
    sys.exit(code)
