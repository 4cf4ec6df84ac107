"""The command line: make, replay and read plans. Needs no torch, so plans can be made on another machine.

Exit codes: 0 done, 1 a file or a budget of the user's will not do (one line on standard error), 2 usage.
"""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

import planner
from planner.errors import FileFormatError
from planner.files import FrozenModel
from planner.policies import POLICIES
from teraio import __version__
from teraio.comparison import compare_policies, sweep_budgets
from teraio.options import parse_bytes
from teraio.summary import summarise_plan, summarise_replay, summarise_trace
from teraio.tables import Page, comparison_tables, plan_tables, replay_tables, show, sweep_tables, trace_tables

app = typer.Typer(
    name="teraio",
    help="Make, replay and read the plans by which teraio moves blocks between device, host and storage.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

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
TimeLimit = Annotated[float, typer.Option(help="Seconds that the solver may take for a plan.")]
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
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the plan.")] = None,
    as_json: AsJson = False,
    rows: Rows = 10,
) -> None:
    """Make a plan for TRACE under budgets, and tell what it does. --json prints the plan itself."""
    budgets = _budgets(parse_bytes("--device", device), host, storage)
    _check_time_limit(time_limit)
    if output is not None and not output.parent.is_dir():
        raise planner.OptionsError(f"option --output: there is no directory {output.parent}; create it first")
    loaded = planner.Trace.load(trace)
    with Console(stderr=True).status("planning"):
        made = planner.plan(loaded, budgets, policy=policy, time_limit_seconds=time_limit)
    if output is not None:
        _save(made, output)
    _show(made, plan_tables(summarise_plan(made, loaded), rows), as_json=as_json)


@app.command()
def simulate(trace: TraceFile, plan: PlanFile, as_json: AsJson = False, rows: Rows = 10) -> None:
    """Replay PLAN on TRACE exactly: iteration time, stalls, peaks, and what each link does."""
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
    as_json: AsJson = False,
) -> None:
    """Plan TRACE with every policy under the same budgets: who waits how long, and what no plan can beat."""
    budgets = _budgets(parse_bytes("--device", device), host, storage)
    _check_time_limit(time_limit)
    loaded = planner.Trace.load(trace)
    with Console(stderr=True).status("planning") as status:
        found = compare_policies(
            loaded, budgets, policy or list(POLICIES), time_limit_seconds=time_limit, progress=status.update
        )
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
    as_json: AsJson = False,
) -> None:
    """Plan TRACE for a range of device budgets: how much memory buys how much speed."""
    sizes = _sizes(device)
    _check_time_limit(time_limit)
    loaded = planner.Trace.load(trace)
    with Console(stderr=True).status("planning") as status:
        found = sweep_budgets(
            loaded,
            sizes,
            _budgets(sizes[0], host, storage),
            policy,
            time_limit_seconds=time_limit,
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
    """Tell what FILE holds: stages, largest blocks, smallest budget; or what a plan moves and predicts."""
    loaded = _load(file)
    if isinstance(loaded, planner.Plan):
        plan_summary = summarise_plan(
            loaded,
            None if trace is None else planner.Trace.load(trace),
            rated_bytes=None if tbw is None else parse_bytes("--tbw", tbw),
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


def _budgets(device_bytes: int, host: str | None, storage: str | None) -> planner.Budgets:
    return planner.Budgets(
        device_bytes=device_bytes,
        host_bytes=None if host is None else parse_bytes("--host", host),
        storage_bytes=None if storage is None else parse_bytes("--storage", storage),
    )


def _check_time_limit(seconds: float) -> None:
    if not 0 < seconds < float("inf"):
        raise planner.OptionsError(f"option --time-limit: found {seconds}, wanted seconds, more than 0")


def _sizes(text: str) -> list[int]:
    """"8GiB:80GiB:10": ten sizes from 8 to 80 GiB at equal distances."""
    parts = text.split(":")
    if len(parts) != 3 or not parts[2].isascii() or not parts[2].isdigit() or not 2 <= int(parts[2]) <= 1000:
        raise planner.OptionsError(
            f"option --device: found {text!r}, wanted LOWEST:HIGHEST:COUNT with a count from 2 to 1000, such as 8GiB:80GiB:10"
        )
    lowest, highest = (parse_bytes("--device", part) for part in parts[:2])
    if lowest >= highest:
        raise planner.OptionsError(f"option --device: found {text!r}, but {parts[0]} is not less than {parts[1]}")
    count = int(parts[2])
    return sorted({lowest + (highest - lowest) * number // (count - 1) for number in range(count)})


def _load(path: Path) -> planner.Trace | planner.Plan:
    """The trace or plan in a file. Raises FileFormatError if it is neither, or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return planner.Trace.load(path)  # says where the fault is
    found = content.get("format") if isinstance(content, dict) else None
    if not isinstance(found, str) or found not in FORMATS:
        raise FileFormatError(
            f"{path}: field 'format' is {found!r}; this command takes {' and '.join(map(repr, FORMATS))} only"
        )
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
    print(f"teraio: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
