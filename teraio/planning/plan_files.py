"""Plans and traces in files: the plan that the user gives, and the files that the user asks for."""

from __future__ import annotations

import logging
from pathlib import Path

import planner
from planner.errors import InfeasiblePlanError, PlanError

logger = logging.getLogger("teraio")


def fit_given_plan(plan: planner.Plan, trace: planner.Trace, budgets: planner.Budgets, path: Path | None) -> planner.Plan:
    """Return the plan as a plan for `trace` and `budgets`. path: where it was read from, for the message.

    Raises PlanError if the plan cannot be carried out on this trace within these budgets.
    """
    plan = plan.model_copy(update={"trace_fingerprint": trace.fingerprint, "budgets": budgets})
    if len(trace.recompute) <= max((each.group for each in plan.recompute), default=-1):
        reasons = sorted({each.reason for each in trace.not_recomputed})
        raise PlanError(
            f"{path}: this plan recomputes stages that cannot run again in this run: {'; '.join(reasons) or 'it has others'}; "
            "make a new one from a trace of this run (option trace_out), or leave out the option plan"
        )
    try:
        planner.simulate(trace, plan)
    except InfeasiblePlanError as error:
        raise PlanError(
            f"{path}: this plan was made for another program, shape or budget: {error}; make a new one from a "
            "trace of this run (option trace_out), or leave out the option plan"
        ) from error
    return plan


def save(file: planner.Trace | planner.Plan, path: Path | None) -> Path | None:
    """Write the file if a path is given. Return the path, or None if nothing was written; a warning then says why."""
    if path is None:
        return None
    try:
        file.save(path)
    except OSError as error:
        what = "trace" if isinstance(file, planner.Trace) else "plan"
        logger.warning("the %s could not be written to %s: %s; training goes on without", what, path, error)
        return None
    return path
