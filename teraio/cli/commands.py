"""The command line: make, replay and read plans. Needs no torch, so plans can be made on another machine.

Exit codes: 0 done, 1 a file or a budget of the user's will not do (one line on standard error), 2 usage.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

import planner
from planner.errors import FileFormatError
from planner.policies import POLICIES
from planner.problem import DEFAULT_GAP, DEFAULT_THREADS, DEFAULT_WRITE_WEIGHT, SolverSettings
from planner.schema import MAX_NUMBER, FrozenModel, printable, read_format
from teraio import __version__
from teraio.cli.comparison import compare_policies, sweep_budgets
from teraio.cli.comparison_tables import comparison_tables, sweep_tables
from teraio.cli.plan_summary import summarise_plan
from teraio.cli.plan_tables import plan_tables, replay_tables
from teraio.cli.replay_summary import summarise_replay
from teraio.cli.tables import Page, show
from teraio.cli.trace_summary import summarise_trace
from teraio.cli.trace_tables import trace_tables
from teraio.options import parse_bytes

app = typer.Typer(
    name="teraio",
    help="Make, replay and read the plans by which teraio moves blocks between device, host and storage.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

MAX_THREADS = 256
LONGEST_MESSAGE = 2000

FORMATS: dict[str, type[planner.Trace] | type[planner.Plan]] = {
    "teraio.trace": planner.Trace,
    "teraio.plan": planner.Plan,
}


class FileKind(StrEnum):
    """The two files."""

    TRACE = "trace"
    PLAN = "plan"


TraceFile = Annotated[Path, typer.Argument(metavar="TRACE", help="A trace, as option trace_out writes it.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan of that trace.")]
Device = Annotated[str, typer.Option(help="Device budget: bytes, or text such as 24GiB.")]
Host = Annotated[str | None, typer.Option(help="Host budget.", show_default="no limit")]
Storage = Annotated[str | None, typer.Option(help="Storage budget.", show_default="no limit")]
Policy = Annotated[str, typer.Option(help=f"How to plan: {', '.join(POLICIES)}.")]
TimeLimit = Annotated[float, typer.Option(help="Seconds that the solver may take for each of its (one to three) programs.")]
Gap = Annotated[
    float,
    typer.Option(
        help="Relative gap at which the solver may stop: 0.005 takes a plan that is proven to be within 0.5 % of the best "
        "that its model has. Larger is faster; 0 goes on to the optimum, or the time limit."
    ),
]
Threads = Annotated[int, typer.Option(help="Threads that the solver may use; more than the machine has free cores do not help.")]
WriteWeight = Annotated[
    float,
    typer.Option(
        help="Seconds of iteration time that a second of copying out is worth. Up to the default it only decides between "
        "plans that are no slower than any other policy's. Raise it where drives wear out too soon ('inspect PLAN --tbw' "
        "tells when): 0.1 gives up a second for every ten seconds less of writing."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Rows = Annotated[int, typer.Option("--rows", min=0, help="Rows of the long tables to show.")]


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
def plan(
    trace: TraceFile,
    device: Device,
    host: Host = None,
    storage: Storage = None,
    policy: Policy = "ilp",
    time_limit: TimeLimit = 30.0,
    gap: Gap = DEFAULT_GAP,
    threads: Threads = DEFAULT_THREADS,
    write_weight: WriteWeight = DEFAULT_WRITE_WEIGHT,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the plan.")] = None,
    as_json: AsJson = False,
    rows: Rows = 10,
) -> None:
    """Make a plan for TRACE under budgets, and tell what it does. --json prints the plan itself."""
    budgets = _budgets(_bytes("--device", device), host, storage)
    settings = _settings(time_limit, gap, threads, write_weight)
    if output is not None and not output.parent.is_dir():
        raise planner.OptionsError(f"option --output: there is no directory {output.parent}; create it first")
    loaded = planner.Trace.load(trace)
    with Console(stderr=True).status("planning"):
        made = planner.plan(loaded, budgets, policy=policy, **asdict(settings))
    if output is not None:
        _save(made, output)
    _show(made, plan_tables(summarise_plan(made, loaded), rows), as_json=as_json)


@app.command()
def simulate(trace: TraceFile, plan: PlanFile, as_json: AsJson = False, rows: Rows = 10) -> None:
    """Replay PLAN on TRACE exactly: iteration time, stalls, peaks, what each link and the host's processor do, and the
    critical path."""
    loaded, decided = planner.Trace.load(trace), planner.Plan.load(plan)
    summary = summarise_replay(loaded, decided, planner.simulate(loaded, decided))
    _show(summary, replay_tables(summary, rows), as_json=as_json)


@app.command()
def compare(
    trace: TraceFile,
    device: Device,
    host: Host = None,
    storage: Storage = None,
    policy: Annotated[list[str] | None, typer.Option(help="One to compare; may be repeated.", show_default="all")] = None,
    time_limit: TimeLimit = 30.0,
    gap: Gap = DEFAULT_GAP,
    threads: Threads = DEFAULT_THREADS,
    write_weight: WriteWeight = DEFAULT_WRITE_WEIGHT,
    as_json: AsJson = False,
) -> None:
    """Plan TRACE with every policy under the same budgets: who waits how long, and what no plan can beat."""
    budgets = _budgets(_bytes("--device", device), host, storage)
    settings = _settings(time_limit, gap, threads, write_weight)
    loaded = planner.Trace.load(trace)
    with Console(stderr=True).status("planning") as status:
        found = compare_policies(loaded, budgets, policy or list(POLICIES), settings=settings, progress=status.update)
    if all(verdict.predicted is None for verdict in found.verdicts):
        raise planner.TeraioError(f"no policy finds a plan: {found.verdicts[0].error}")
    _show(found, comparison_tables(found), as_json=as_json)


@app.command()
def sweep(
    trace: TraceFile,
    device: Annotated[
        str, typer.Option(metavar="LOWEST:HIGHEST:COUNT", help="Device budgets at equal distances, as in 8GiB:80GiB:10.")
    ],
    host: Host = None,
    storage: Storage = None,
    policy: Policy = "ilp",
    time_limit: TimeLimit = 30.0,
    gap: Gap = DEFAULT_GAP,
    threads: Threads = DEFAULT_THREADS,
    write_weight: WriteWeight = DEFAULT_WRITE_WEIGHT,
    as_json: AsJson = False,
) -> None:
    """Plan TRACE for a range of device budgets: how much memory buys how much speed."""
    sizes = _sizes(device)
    settings = _settings(time_limit, gap, threads, write_weight)
    loaded = planner.Trace.load(trace)
    with Console(stderr=True).status("planning") as status:
        found = sweep_budgets(
            loaded,
            sizes,
            _budgets(sizes[0], host, storage),
            policy,
            settings=settings,
            progress=status.update,
        )
    if found.points[-1].predicted is None:
        raise planner.TeraioError(f"no budget of the range suffices: {found.points[-1].error}")
    _show(found, sweep_tables(found), as_json=as_json)


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace or a plan.")],
    trace: Annotated[Path | None, typer.Option(help="The plan's trace, for names, sizes and stalls.")] = None,
    tbw: Annotated[
        str | None, typer.Option(help="Bytes that the drives may be written in all, such as 600TB: how long do they last?")
    ] = None,
    as_json: AsJson = False,
    rows: Rows = 10,
) -> None:
    """Tell what FILE holds: stages, memory over time, idle blocks, what can update on the host, smallest budget; or what
    a plan moves, updates on the host and predicts, and with --trace why each block moves and why the iteration takes as
    long as it does."""
    loaded = _load(file)
    if isinstance(loaded, planner.Plan):
        plan_summary = summarise_plan(
            loaded,
            None if trace is None else planner.Trace.load(trace),
            rated_bytes=None if tbw is None else _bytes("--tbw", tbw),
        )
        _show(plan_summary, plan_tables(plan_summary, rows), as_json=as_json)
        return
    if trace is not None:
        raise planner.OptionsError(f"option --trace: {file} is a trace itself; leave the option out")
    if tbw is not None:
        raise planner.OptionsError(f"option --tbw: {file} is a trace; only a plan tells what is written")
    trace_summary = summarise_trace(loaded)
    _show(trace_summary, trace_tables(trace_summary, rows), as_json=as_json)


@app.command()
def schema(kind: Annotated[FileKind, typer.Argument(help="Which file's schema to print.")]) -> None:
    """Print the JSON Schema of a file format."""
    model = FORMATS[f"teraio.{kind.value}"]
    print(json.dumps(model.model_json_schema(), indent=1))


def _bytes(name: str, text: str) -> int:
    """Bytes from a command line, no more than a file can say. Raises OptionsError, which does not quote pages."""
    if len(text) > 40:
        raise planner.OptionsError(f"option {name}: found {printable(text, most=40)!r}, wanted {MAX_NUMBER:,} bytes at the most")
    return parse_bytes(name, text)


def _budgets(device_bytes: int, host: str | None, storage: str | None) -> planner.Budgets:
    return planner.Budgets(
        device_bytes=device_bytes,
        host_bytes=None if host is None else _bytes("--host", host),
        storage_bytes=None if storage is None else _bytes("--storage", storage),
    )


def _settings(time_limit: float, gap: float, threads: int, write_weight: float) -> SolverSettings:
    if not 0 < time_limit < float("inf"):
        raise planner.OptionsError(f"option --time-limit: found {time_limit}, wanted seconds, more than 0")
    if not 0 <= gap < 1:
        raise planner.OptionsError(f"option --gap: found {gap}, wanted a share of at least 0 and less than 1, such as 0.005")
    if not 1 <= threads <= MAX_THREADS:
        raise planner.OptionsError(f"option --threads: found {threads}, wanted a number from 1 to {MAX_THREADS}")
    if not 0 <= write_weight < float("inf"):
        raise planner.OptionsError(f"option --write-weight: found {write_weight}, wanted a number of at least 0")
    return SolverSettings(time_limit_seconds=time_limit, gap=gap, threads=threads, write_weight=write_weight)


def _sizes(text: str) -> list[int]:
    """ "8GiB:80GiB:10": ten sizes from 8 to 80 GiB at equal distances."""
    parts = text.split(":")
    if len(parts) != 3 or not re.fullmatch("[0-9]{1,4}", parts[2]) or not 2 <= int(parts[2]) <= 1000:
        raise planner.OptionsError(
            f"option --device: found {printable(text, most=80)!r}, wanted LOWEST:HIGHEST:COUNT with a count from 2 to 1000, "
            "such as 8GiB:80GiB:10"
        )
    lowest, highest = (_bytes("--device", part) for part in parts[:2])
    if lowest >= highest:
        raise planner.OptionsError(f"option --device: found {text!r}, but {parts[0]} is not less than {parts[1]}")
    count = int(parts[2])
    return sorted({lowest + (highest - lowest) * number // (count - 1) for number in range(count)})


def _load(path: Path) -> planner.Trace | planner.Plan:
    """The trace or plan in a file. Raises FileFormatError if it is neither, or damaged."""
    found = read_format(path)
    if found is None or found not in FORMATS:
        shown = repr(found and printable(found, most=60))
        raise FileFormatError(f"{path}: field 'format' is {shown}; this command takes {' and '.join(map(repr, FORMATS))} only")
    return FORMATS[found].load(path)


def _save(made: planner.Plan, path: Path) -> None:
    try:
        made.save(path)
    except OSError as error:
        raise planner.TeraioError(f"{path}: cannot be written: {error.strerror}") from error


def _show(model: FrozenModel, page: Page, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(model.model_dump(mode="json", by_alias=True), indent=1))
    else:
        show(page)


def _fail(message: str, *, code: int) -> NoReturn:
    line = printable(" ".join(message.split()), most=LONGEST_MESSAGE)  # it may quote names out of a file
    print(f"teraio: {line}", file=sys.stderr)
    sys.exit(code)
