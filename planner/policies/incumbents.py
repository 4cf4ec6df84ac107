"""Plans of tighter problems as candidates: more memory, a larger tier or a faster link should give no slower plan.

A plan for smaller budgets is one for larger budgets, too; if it keeps its own budgets, its replay is the same. So with plans for
smaller budgets as incumbents, a plan is never slower than theirs. With faster links, an incumbent is replayed anew and compared
as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from planner.errors import BudgetError, InfeasiblePlanError, PlanError
from planner.policies.predictions import iteration_seconds, with_predictions
from planner.problem import Problem, folded, spelled_out
from planner.schema import Budgets, Plan, Trace

__all__ = ["no_slower_than"]


def no_slower_than(incumbents: Sequence[Plan], trace: Trace, budgets: Budgets, make: Callable[[], Plan]) -> Plan:
    """Return the plan that `make` makes, or an incumbent where that is faster or no plan is made.

    incumbents: plans for the same stages and blocks; budgets and hardware may be others. One that is faster under its own
    budgets, which are no larger, keeps them. Raises BudgetError and InfeasiblePlanError as `make` does.
    """
    found = [made for incumbent in incumbents for made in _carried_over(trace, budgets, incumbent)]
    try:
        found.insert(0, make())
    except (BudgetError, InfeasiblePlanError):
        if not found:
            raise
    return min(found, key=iteration_seconds)


def _carried_over(trace: Trace, budgets: Budgets, incumbent: Plan) -> Iterator[Plan]:
    tried = [budgets] + [incumbent.budgets] * (incumbent.budgets != budgets and _within(incumbent.budgets, budgets))
    for each in tried:
        given = incumbent.model_copy(update={"trace_fingerprint": trace.fingerprint, "budgets": each})
        try:
            derived, plan = spelled_out(trace, given)
            plan = plan.model_copy(update={"trace_fingerprint": derived.fingerprint})
            on_host = [update.subgroup for update in plan.updates if update.where == "host"]
            made = with_predictions(Problem.of(derived, each, on_host), plan)
            yield folded(trace, incumbent.recompute, made)
        except (BudgetError, InfeasiblePlanError, PlanError):
            continue


def _within(own: Budgets, given: Budgets) -> bool:
    pairs = ((own.host_bytes, given.host_bytes), (own.storage_bytes, given.storage_bytes))
    lower = all(most is None or (size is not None and size <= most) for size, most in pairs)
    return lower and own.device_bytes <= given.device_bytes
