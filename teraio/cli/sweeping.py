"""What `teraio sweep` finds, time against budget, and its page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import planner
from planner.problem import SolverSettings, live_bytes
from teraio.advice import planned
from teraio.cli import output
from teraio.cli.arguments import as_options
from teraio.cli.output import Column, Data, Facts, Page, Table, exact_bytes, format_bytes, format_seconds

Progress = Callable[[str], None]  # called with a text that says what is being planned now


def sweep_budgets(
    trace: planner.Trace,
    device_bytes: Sequence[int],
    budgets: planner.Budgets,
    policy: str,
    *,
    settings: SolverSettings,
    progress: Progress,
) -> Data:
    """Plan for each of `device_bytes`, with the other budgets as in `budgets`.

    A plan for a smaller budget is a candidate for a larger one, so that a larger budget is never slower.
    `points`: by device budget, ascending. `planned_for_bytes`: the budget that the best plan was made for, which is this one or
    a smaller one; None without a plan.
    """
    points: list[Data] = []
    best: planner.Plan | None = None
    for number, size in enumerate(sorted(device_bytes), 1):
        progress(f"planning for {size:,} bytes, {number} of {len(device_bytes)}")
        tried = budgets.model_copy(update={"device_bytes": size})
        made, _, reason = planned(trace, tried, settings, policy=policy, incumbents=[best] if best else [])
        planned_for = made and made.budgets.device_bytes
        predicted = made and output.data_of(made)["predicted"]
        error = as_options(reason)
        points.append({"device_bytes": size, "planned_for_bytes": planned_for, "predicted": predicted, "error": error})
        best = made or best
    return {
        "trace_name": trace.name,
        "policy": policy,
        "work": output.work_of(trace),
        "ideal_seconds": trace.ideal_seconds,
        "floor_bytes": planner.floor(trace)[0],
        "peak_bytes": max(live_bytes(trace)),
        "points": points,
    }


def sweep_page(sweep: Data) -> Page:
    """Show iteration time against device budget."""
    overview = {
        "trace": sweep["trace_name"],
        "policy": sweep["policy"],
        "without waiting": format_seconds(sweep["ideal_seconds"]),
        "floor (smallest budget)": exact_bytes(sweep["floor_bytes"]),
        "peak if nothing moves": exact_bytes(sweep["peak_bytes"]),
    }
    return Facts(overview), sweep_table(sweep)


def sweep_table(sweep: Data) -> Table:
    """Return a row for each device budget."""

    def note(point: Data) -> str:
        planned_for = point["planned_for_bytes"]
        smaller = planned_for is not None and planned_for < point["device_bytes"]
        return f"the plan for {output.in_asked_unit(planned_for)}" if smaller else point["error"]

    def beyond(point: Data) -> str:
        ideal = sweep["ideal_seconds"]
        return f"{point['predicted']['iteration_seconds'] / ideal - 1:.1%}" if point["predicted"] and ideal else ""

    columns: dict[str, Column] = {
        ">device budget": lambda point: output.in_asked_unit(point["device_bytes"]),
        ">iteration": "predicted.iteration_seconds",
        **output.rate_columns(sweep["work"]),
        ">over no waiting": beyond,
        ">stall": "predicted.stall_seconds",
        ">recomputed": lambda point: point["predicted"] and format_seconds(point["predicted"].get("recompute_seconds", 0.0)),
        ">moved": lambda point: point["predicted"] and format_bytes(sum(point["predicted"]["moved_bytes"].values())),
        ">written to storage": "predicted.storage_written_bytes",
        "note": note,
    }
    return Table(columns=columns, rows=sweep["points"])
