"""The commands that make plans and replay them: plan, simulate, compare, sweep."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import planner
from planner.policies import POLICIES
from planner.problem import SolverSettings
from teraio.cli import arguments
from teraio.cli.arguments import (
    AsJson,
    Device,
    Host,
    PlanFile,
    Policy,
    Rows,
    Storage,
    TraceFile,
    with_solver_options,
)
from teraio.cli.comparison import compare_policies, sweep_budgets
from teraio.cli.comparison_tables import comparison_tables, sweep_tables
from teraio.cli.output import save, show_or_print
from teraio.cli.plan_summary import summarise_plan
from teraio.cli.plan_tables import plan_tables, replay_tables
from teraio.cli.replay_summary import summarise_replay
from teraio.options import require_directory


@with_solver_options
def plan(
    trace: TraceFile,
    device: Device,
    host: Host = None,
    storage: Storage = None,
    policy: Policy = "ilp",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the plan.")] = None,
    as_json: AsJson = False,
    rows: Rows = 10,
    *,
    settings: SolverSettings,
) -> None:
    """Make a plan for TRACE under the budgets and show it. --json prints the plan itself."""
    budgets = arguments.budgets(arguments.size("--device", device), host, storage)
    if output is not None:
        require_directory("--output", output.parent)
    loaded = planner.Trace.load(trace)
    with Console(stderr=True).status("planning"):
        made = planner.plan(loaded, budgets, policy=policy, **asdict(settings))
    if output is not None:
        save(made, output)
    show_or_print(made, plan_tables(summarise_plan(made, loaded), rows), as_json=as_json)


def simulate(
    trace: TraceFile,
    plan: PlanFile,
    as_json: AsJson = False,
    rows: Rows = 10,
) -> None:
    """Replay PLAN on TRACE in the simulator. Shows iteration time, stalls, peak memory, the work of each link and of the host's
    processor, and the critical path."""
    loaded, decided = planner.Trace.load(trace), planner.Plan.load(plan)
    summary = summarise_replay(loaded, decided, planner.simulate(loaded, decided))
    show_or_print(summary, replay_tables(summary, rows), as_json=as_json)


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
    show_or_print(found, comparison_tables(found), as_json=as_json)


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
    show_or_print(found, sweep_tables(found), as_json=as_json)
