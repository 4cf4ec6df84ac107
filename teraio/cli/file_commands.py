"""The commands about the files themselves: inspect shows what is in one, schema prints the JSON Schema of a format."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

import planner
from planner.errors import FileFormatError
from planner.schema import FrozenModel, printable, read_format
from teraio.cli import arguments
from teraio.cli.arguments import AsJson, Rows
from teraio.cli.output import show_or_print
from teraio.cli.plan_summary import summarise_plan
from teraio.cli.plan_tables import plan_tables
from teraio.cli.tables import write_out
from teraio.cli.trace_summary import summarise_trace
from teraio.cli.trace_tables import trace_tables

FORMATS: dict[str, type[planner.Trace] | type[planner.Plan]] = {
    "teraio.trace": planner.Trace,
    "teraio.plan": planner.Plan,
}
SCHEMAS: dict[str, type[FrozenModel]] = {"trace": planner.Trace, "plan": planner.Plan}


class FileKind(StrEnum):
    """The file formats."""

    TRACE = "trace"
    PLAN = "plan"


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace or a plan.")],
    trace: Annotated[Path | None, typer.Option(help="The trace of the plan, for names, sizes and stalls.")] = None,
    tbw: Annotated[
        str | None,
        typer.Option(help="Rated bytes written of the drives (TBW), such as 600TB. Shows how long they last."),
    ] = None,
    as_json: AsJson = False,
    rows: Rows = 10,
) -> None:
    """Show what a trace or a plan contains. A trace: stages, memory over time, idle blocks, updates that can run on the host, the
    smallest budget. A plan: moves, updates on the host, predictions; with --trace also why each block moves and why the iteration
    takes as long as it does."""
    loaded = _load(file)
    if isinstance(loaded, planner.Plan):
        plan_summary = summarise_plan(
            loaded,
            None if trace is None else planner.Trace.load(trace),
            rated_bytes=None if tbw is None else arguments.size("--tbw", tbw),
        )
        show_or_print(plan_summary, plan_tables(plan_summary, rows), as_json=as_json)
        return
    if trace is not None:
        raise planner.OptionsError(f"option --trace: {file} is a trace itself; leave the option out")
    if tbw is not None:
        raise planner.OptionsError(f"option --tbw: {file} is a trace; only a plan tells what is written")
    trace_summary = summarise_trace(loaded)
    show_or_print(trace_summary, trace_tables(trace_summary, rows), as_json=as_json)


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
