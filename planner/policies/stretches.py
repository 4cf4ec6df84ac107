"""Long iterations that repeat a stretch of stages: the stretch is planned once, with its borders, and replayed in all its copies.

See [Note: iterations that repeat] in `planner.problem.repeats`.
"""

from __future__ import annotations

from collections.abc import Callable

from planner.errors import InfeasiblePlanError, PlanError
from planner.policies.optimise import Task, exact_candidates
from planner.policies.predictions import with_predictions
from planner.problem import Decision, Problem, folded, repeats_of, spelled_out
from planner.schema import Budgets, Plan, Trace

MOST_STAGES = 500  # longer iterations take so long to plan as a whole that less would be found


def planned_by_stretch(trace: Trace, budgets: Budgets, task: Task, make: Callable[[Trace, Budgets, Task], Plan]) -> Plan | None:
    """Return the plan of the short iteration that `make` makes, laid out over the whole one and made exact there.

    None for short iterations, for those in which nothing repeats, and where the plan does not fit the whole iteration. Raises
    BudgetError and InfeasiblePlanError as `make` does.
    """
    repeats = repeats_of(trace) if len(trace.stages) > MOST_STAGES else None
    if repeats is None:
        return None
    short = make(repeats.short, budgets, task)
    try:
        laid_out = repeats.laid_out(short)
        derived, plan = spelled_out(trace, laid_out)
        on_host = [update.subgroup for update in plan.updates if update.where == "host"]
        problem = Problem.of(derived, budgets, on_host)
        decisions = {
            problem.period_after[move.block, move.after]: Decision(
                tier=move.tier,
                leave=move.after if move.offload is None else move.offload.start,
                start=move.before if move.prefetch is None else move.prefetch.start,
            )
            for move in plan.moves
            if (move.block, move.after) in problem.period_after  # gradients of updates on the host have no period
        }
        best = min(exact_candidates(problem, decisions, task.settings.write_weight), key=lambda candidate: candidate.cost)
    except (InfeasiblePlanError, PlanError):
        return None
    made = best.plan.model_copy(update={"policy": task.policy, "solver": short.solver})
    return folded(trace, laid_out.recompute, with_predictions(problem, made, best.timeline))
