"""The plan in PyTorch's structured trace: with TORCH_TRACE set, `tlparse` shows what was planned beside what was compiled."""

from __future__ import annotations

import json
from collections import Counter

from torch._logging._internal import trace_structured

import planner
from planner.schema import Predicted

_LARGEST_MOVES = 20


def record_plan(plan: planner.Plan, trace: planner.Trace) -> None:
    """Write the plan, as JSON, and its summary, as text, to the structured trace: artifacts `teraio_plan`, `teraio_plan_summary`.

    trace: the one that the plan was made for. Formats nothing where nobody writes a structured trace.
    """
    # These run between iterations, where nothing is being compiled: there is no compile id to look for.
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "teraio_plan", "encoding": "json"},
        payload_fn=lambda: json.dumps(plan.model_dump(mode="json"), indent=1),
        expect_trace_id=False,
    )
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "teraio_plan_summary", "encoding": "string"},
        payload_fn=lambda: summary(plan, trace),
        expect_trace_id=False,
    )


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
