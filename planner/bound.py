"""Lower bounds on the iteration time that hold for every plan. Simple ones; valid by construction."""

from __future__ import annotations

from planner.problem import Problem

__all__ = ["lower_bound_seconds"]


def lower_bound_seconds(problem: Problem) -> float:
    """The largest of: the sum of the stage durations, and what must cross the links in one iteration.

    At a stage whose live bytes exceed the budget by x, at least x bytes of idle blocks must be absent. Each
    is copied in once before its next use, so x bytes cross the inward links; and those that some stage
    writes are also copied out at least once between two writes, so x less the bytes of never-written blocks
    around the stage cross the outward links. Several tiers work side by side: their rates add up.
    """
    compute = problem.trace.ideal_seconds
    if not problem.routes:
        return compute
    inward = sum(route.inward.bytes_per_second for route in problem.routes)
    outward = sum(route.outward.bytes_per_second for route in problem.routes)
    worst = compute
    for stage, live in enumerate(problem.live_bytes):
        absent = live - problem.budgets.device_bytes
        if absent <= 0:
            continue
        periods = (problem.periods[index] for index in problem.covering[stage])
        clean = sum(period.size_bytes for period in periods if period.frozen)
        worst = max(worst, absent / inward, (absent - clean) / outward)
    return worst
