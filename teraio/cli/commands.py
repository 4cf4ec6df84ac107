"""The command line: its commands, in the order in which the help lists them. Only `capture` and `doctor` need torch, so plans can
be made on another machine.

Exit codes: 0 success; 1 a file or a budget is not usable; 2 wrong usage. An error is one line on standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer

import planner
from planner.schema import printable
from teraio import __version__
from teraio.cli.arguments import as_options
from teraio.cli.machine_commands import advise, capture, doctor
from teraio.cli.plan_commands import inspect, plan, report, schema, simulate, sweep

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
