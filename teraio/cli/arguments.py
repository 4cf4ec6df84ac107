"""Arguments and options that several commands share, and what is made of them. All functions raise OptionsError."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

import planner
from planner.policies import POLICIES
from planner.problem import DEFAULT_THREADS, DEFAULT_TIME_LIMIT_SECONDS, DEFAULT_WRITE_WEIGHT, SolverSettings
from planner.schema import MAX_NUMBER, printable
from teraio.options import parse_bytes

MAX_THREADS = 256

TraceFile = Annotated[Path, typer.Argument(metavar="TRACE", help="A trace file, as the option trace_out writes it.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]
Device = Annotated[str, typer.Option(help="Device budget: bytes, or text such as 24GiB.")]
Host = Annotated[str | None, typer.Option(help="Host budget. 0: the host tier is not used.", show_default="no limit")]
Storage = Annotated[str | None, typer.Option(help="Storage budget. 0: the drives are not used.", show_default="no limit")]
Policy = Annotated[str, typer.Option(help=f"Planning policy: {', '.join(POLICIES)}.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Rows = Annotated[int, typer.Option("--rows", min=0, help="Number of rows to show of each long table.")]


def _of_solver(told: str) -> Any:
    return typer.Option(help=told, rich_help_panel="Solver")


TimeLimit = Annotated[
    float,
    _of_solver(
        "Seconds of processor time for each plan. After that, the best plan so far counts, whose status is 'time limit'; "
        "its lower bound may take up to 10 more."
    ),
]
Threads = Annotated[int, _of_solver("Threads that the solver may use. More threads than free cores do not help.")]
WriteWeight = Annotated[
    float,
    _of_solver(
        "Seconds of iteration time that the planner may give up to save one second of copying from the device. Up to the "
        "default, it only chooses among plans that are not slower than those of other policies. Raise it where drives wear out "
        "too soon ('teraio advise' shows what is written a day): 0.1 gives up one second for every ten seconds less of writing."
    ),
]


def with_solver_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the solver's options on its command line. The command gets them as one argument, `settings`."""
    own = inspect.signature(command, eval_str=True)
    options = list(inspect.signature(solver_settings, eval_str=True).parameters.values())

    @wraps(command)
    def run(**given: Any) -> None:
        settings = solver_settings(**{option.name: given.pop(option.name) for option in options})
        command(**given, settings=settings)

    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in own.parameters.values() if p.name != "settings"]
    run.__signature__ = own.replace(parameters=[*parameters, *options])  # type: ignore[attr-defined]
    return run


def solver_settings(
    *,
    time_limit: TimeLimit = DEFAULT_TIME_LIMIT_SECONDS,
    threads: Threads = DEFAULT_THREADS,
    write_weight: WriteWeight = DEFAULT_WRITE_WEIGHT,
) -> SolverSettings:
    """Check the solver's options; the parameters are the options, with their defaults."""
    if not 0 < time_limit < float("inf"):
        raise planner.OptionsError(f"option --time-limit: found {time_limit}, wanted seconds, more than 0")
    if not 1 <= threads <= MAX_THREADS:
        raise planner.OptionsError(f"option --threads: found {threads}, wanted a number from 1 to {MAX_THREADS}")
    if not 0 <= write_weight < float("inf"):
        raise planner.OptionsError(f"option --write-weight: found {write_weight}, wanted a number of at least 0")
    return SolverSettings(time_limit_seconds=time_limit, threads=threads, write_weight=write_weight)


def as_options(message: str) -> str:
    """Return a message in which the options of training have the names that they have on the command line."""
    for tier, name in (("memory", "--device"), ("host", "--host"), ("storage", "--storage")):
        message = re.sub(rf"(\ba )?\b{tier}_budget\b", name, message)
    return message


def size(name: str, text: str) -> int:
    """Return the bytes that the option `name` gives. The message of an error quotes no long text."""
    if len(text) > 40:
        raise planner.OptionsError(f"option {name}: found {printable(text, most=40)!r}, wanted {MAX_NUMBER:,} bytes at the most")
    return parse_bytes(name, text)


def budgets(device_bytes: int, host: str | None, storage: str | None) -> planner.Budgets:
    """Return the budgets; None for a tier without a limit."""
    return planner.Budgets(
        device_bytes=device_bytes, host_bytes=_tier_size("--host", host), storage_bytes=_tier_size("--storage", storage)
    )


def _tier_size(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    return 0 if text.strip() == "0" else size(name, text)


def size_range(text: str) -> list[int]:
    """Return the sizes of a range, ascending: "8GiB:80GiB:10" are ten sizes from 8 to 80 GiB at equal distances."""
    bounds = text.split(":")
    if len(bounds) != 3 or not re.fullmatch("[0-9]{1,4}", bounds[2]) or not 2 <= int(bounds[2]) <= 1000:
        raise planner.OptionsError(
            f"option --device: found {printable(text, most=80)!r}, wanted LOWEST:HIGHEST:COUNT with a count from 2 to 1000, "
            "such as 8GiB:80GiB:10"
        )
    lowest, highest = (size("--device", bound) for bound in bounds[:2])
    if lowest >= highest:
        raise planner.OptionsError(f"option --device: found {text!r}, but {bounds[0]} is not less than {bounds[1]}")
    count = int(bounds[2])
    # Whole units, so that tables show no odd ones.
    whole = next(unit for unit in (1 << 20, 10**6, 1) if not lowest % unit and not highest % unit)
    return sorted({lowest + (highest - lowest) // whole * number // (count - 1) * whole for number in range(count)})
