"""Plans and traces in files: the plan that the user gives, the files that the user asks for, PyTorch's structured trace."""

from __future__ import annotations

import json
import logging
from collections import Counter
from functools import partial
from pathlib import Path

from torch._logging._internal import trace_structured

import planner
from planner.errors import InfeasiblePlanError, PlanError
from planner.schema import Predicted

logger = logging.getLogger("teraio")

_LARGEST_MOVES = 20


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


def record_plan(plan: planner.Plan, trace: planner.Trace) -> None:
    """Write the plan, as JSON, and its summary, as text, to the structured trace: artifacts `teraio_plan`, `teraio_plan_summary`.

    trace: the one that the plan was made for. Formats nothing where nobody writes a structured trace.
    """
    # These run between iterations, where nothing is being compiled: there is no compile id to look for.
    for name, encoding, payload in (
        ("teraio_plan", "json", lambda: json.dumps(plan.model_dump(mode="json"), indent=1)),
        ("teraio_plan_summary", "string", lambda: summary(plan, trace)),
    ):
        told = partial(dict[str, str], name=name, encoding=encoding)
        trace_structured("artifact", metadata_fn=told, payload_fn=payload, expect_trace_id=False)


def summary(plan: planner.Plan, trace: planner.Trace) -> str:
    """The plan in some lines of text: budgets, predicted times and bytes, and the largest moves."""
    on_host = sum(update.where == "host" for update in plan.updates)
    tiers = Counter(move.tier for move in plan.moves)
    lines = [
        f"trace: {trace.name}, {len(trace.stages)} stages, {len(trace.blocks)} blocks, fingerprint {trace.fingerprint}",
        f"policy: {plan.policy}; solver {plan.solver.name}: {plan.solver.status}, {plan.solver.solve_seconds:.1f} s",
        f"device budget: {plan.budgets.device_bytes:,} bytes",
        f"host budget: {_limit(plan.budgets.host_bytes)}",
        f"storage budget: {_limit(plan.budgets.storage_bytes)}",
        f"moves: {len(plan.moves)}{''.join(f', {count} to {tier}' for tier, count in sorted(tiers.items()))}",
        f"updates on the host: {on_host} of {len(trace.subgroups)} subgroups",
        *(_predicted(plan.predicted) if plan.predicted is not None else ()),
    ]
    largest = sorted(plan.moves, key=lambda move: -trace.blocks[move.block].size_bytes)[:_LARGEST_MOVES]
    return "\n".join([*lines, *(_move(move, trace) for move in largest)])


def _predicted(predicted: Predicted) -> list[str]:
    return [
        f"predicted iteration: {predicted.iteration_seconds:.6f} s, of which {predicted.stall_seconds:.6f} s of waiting",
        f"iteration with unlimited memory: {predicted.ideal_seconds:.6f} s",
        f"no plan is faster than: {predicted.lower_bound_seconds:.6f} s",
        *(f"peak of {tier}: {size:,} bytes" for tier, size in predicted.peak_bytes.items()),
        *(f"moved {link} per iteration: {size:,} bytes" for link, size in predicted.moved_bytes.items()),
    ]


def _move(move: planner.Move, trace: planner.Trace) -> str:
    block = trace.blocks[move.block]
    after, before = (trace.stages[stage % len(trace.stages)].name for stage in (move.after, move.before))
    back = "does not come back" if move.prefetch is None else f"back for {before}"
    return f"move: {block.name}, {block.size_bytes:,} bytes, to {move.tier} after {after}, {back}"


def _limit(size_bytes: int | None) -> str:
    return "no limit" if size_bytes is None else f"{size_bytes:,} bytes"
