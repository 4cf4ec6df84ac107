"""The command `teraio report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import planner
from planner.policies import POLICIES
from planner.problem import SolverSettings, live_bytes
from planner.schema import Plan, Trace
from teraio.cli.arguments import AsJson, PlanFile
from teraio.cli.output import Data, working, write_file, write_out
from teraio.cli.report.content import report_of
from teraio.cli.report.exports import chrome_trace, draw
from teraio.cli.report.page import html_page
from teraio.cli.sweeping import sweep_budgets
from teraio.options import require_directory


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
    decided, loaded = Plan.load(plan), Trace.load(trace)
    needed = points and (as_json or output is not None)
    made = report_of(decided, loaded, sweep=_sweep(decided, loaded, points, settings) if needed else None)
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


def _sweep(plan: Plan, trace: Trace, points: int, settings: SolverSettings) -> Data:
    """Plan for budgets from the smallest that works to all that is needed. They are close where memory is scarce."""
    lowest, highest = planner.floor(trace)[0], max(*live_bytes(trace), plan.budgets.device_bytes)
    ratio = highest / max(lowest, 1)
    sizes = {round(lowest * ratio ** (number / max(points - 1, 1))) for number in range(points)}
    policy = plan.policy if plan.policy in POLICIES else "ilp"
    with working("planning") as progress:
        return sweep_budgets(
            trace, sorted(sizes | {plan.budgets.device_bytes}), plan.budgets, policy, settings=settings, progress=progress
        )
