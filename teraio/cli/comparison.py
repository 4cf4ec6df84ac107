"""The results of `teraio compare` (policies side by side) and `teraio sweep` (time against budget), and their pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import planner
from planner.problem import SolverSettings, live_bytes
from teraio.advice import planned
from teraio.cli.arguments import as_options
from teraio.cli.output import (
    Column,
    Data,
    Facts,
    Page,
    Table,
    budget_facts,
    data_of,
    exact_bytes,
    format_bytes,
    format_seconds,
    in_asked_unit,
    rate_columns,
    work_of,
)

Progress = Callable[[str], None]  # called with a text that says what is being planned now


def compare_policies(
    trace: planner.Trace, budgets: planner.Budgets, policies: Sequence[str], *, settings: SolverSettings, progress: Progress
) -> Data:
    """Plan with each policy under the same budgets, one after the other. Raises OptionsError for an unknown policy.

    `verdicts`: for each policy the prediction from the simulator (None without a plan), and the error that it ended with.
    `lower_bound_seconds`: no plan is faster than this; None if no policy found a plan.
    """
    verdicts: list[Data] = []
    for policy in policies:
        progress(f"planning with {policy}")
        made, _, reason = planned(trace, budgets, settings, policy=policy)
        verdicts.append({"policy": policy, "predicted": made and data_of(made)["predicted"], "error": as_options(reason)})
    bounds = [verdict["predicted"]["lower_bound_seconds"] for verdict in verdicts if verdict["predicted"]]
    return {
        "trace_name": trace.name,
        "budgets": data_of(budgets),
        "work": work_of(trace),
        "ideal_seconds": trace.ideal_seconds,
        "lower_bound_seconds": max(bounds, default=None),
        "verdicts": verdicts,
    }


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
        predicted = made and data_of(made)["predicted"]
        error = as_options(reason)
        points.append({"device_bytes": size, "planned_for_bytes": planned_for, "predicted": predicted, "error": error})
        best = made or best
    return {
        "trace_name": trace.name,
        "policy": policy,
        "work": work_of(trace),
        "ideal_seconds": trace.ideal_seconds,
        "floor_bytes": planner.floor(trace)[0],
        "peak_bytes": max(live_bytes(trace)),
        "points": points,
    }


def comparison_page(comparison: Data) -> Page:
    """Show policies side by side, and the bound that none can beat."""
    bound = comparison["lower_bound_seconds"]
    overview = {
        "trace": comparison["trace_name"],
        **budget_facts(comparison["budgets"]),
        "without waiting": format_seconds(comparison["ideal_seconds"]),
        "no plan is faster than": "" if bound is None else format_seconds(bound),
    }
    return Facts(overview), comparison_table(comparison)


def comparison_table(comparison: Data) -> Table:
    """Return a row for each policy."""
    achieved = _achieved(">over the bound", comparison["lower_bound_seconds"], comparison["work"])
    return Table(columns={"policy": "policy", **achieved, "note": "error"}, rows=comparison["verdicts"])


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
        return f"the plan for {in_asked_unit(planned_for)}" if smaller else point["error"]

    achieved = _achieved(">over no waiting", sweep["ideal_seconds"], sweep["work"])
    return Table(
        columns={">device budget": lambda point: in_asked_unit(point["device_bytes"]), **achieved, "note": note},
        rows=sweep["points"],
    )


def _achieved(over: str, seconds: float | None, work: Data | None) -> Mapping[str, Column]:
    """Return the columns of what a plan achieves. over: the name of that for its time beyond `seconds`."""

    def beyond(row: Data) -> str:
        return f"{row['predicted']['iteration_seconds'] / seconds - 1:.1%}" if row["predicted"] and seconds else ""

    return {
        ">iteration": "predicted.iteration_seconds",
        **rate_columns(work),
        over: beyond,
        ">stall": "predicted.stall_seconds",
        ">recomputed": lambda row: row["predicted"] and format_seconds(row["predicted"].get("recompute_seconds", 0.0)),
        ">moved": lambda row: row["predicted"] and format_bytes(sum(row["predicted"]["moved_bytes"].values())),
        ">written to storage": "predicted.storage_written_bytes",
    }
