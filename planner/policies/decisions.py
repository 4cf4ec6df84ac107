"""What a coarse solution decides for each period, and what its moves cost."""

from __future__ import annotations

from planner.ilp import CoarseSolution, in_order_of_need
from planner.problem import Decision, Decisions, Problem, TierCapacity, copies_out

__all__ = ["copy_costs", "decisions_of"]


def decisions_of(problem: Problem, solution: CoarseSolution) -> tuple[Problem, Decisions]:
    """Return what the solution chooses, and the problem that is left when its subgroups update on the host.

    Rounding may overfill a tier. A period then gets the fastest other tier with room, or stays; updates on the host come first.
    """
    chosen = {(problem.periods[i].block, problem.periods[i].after): tier for i, tier in solution.tiers.items()}
    on_host = in_order_of_need(problem, solution.on_host)
    left = problem if tuple(on_host) == problem.on_host else Problem.of(problem.source, problem.budgets, on_host)
    room = TierCapacity(left, {})
    decisions: Decisions = {}
    for index, period in enumerate(left.periods):
        tier = "host" if index in left.updated else chosen.get((period.block, period.after))
        if tier is not None and not room.fits(index, tier):
            tier = room.best(index)
        if tier is not None:
            room.take(index, tier)
            decisions[index] = Decision(tier=tier, leave=period.after, start=period.before)
    return left, decisions


def copy_costs(problem: Problem, decisions: Decisions) -> dict[int, float]:
    """Return the seconds that each move costs, by period."""
    copied_out = copies_out(problem, decisions)
    return {index: _cost(problem, index, decision, out=index in copied_out) for index, decision in decisions.items()}


def _cost(problem: Problem, index: int, decision: Decision, *, out: bool) -> float:
    """Seconds of the copy in. For a final period, which has none, seconds of the copy out."""
    route, period = problem.route(decision.tier), problem.periods[index]
    if period.final:
        return route.outward.seconds(period.size_bytes) if out else 0.0
    return route.inward.seconds(period.size_bytes)
