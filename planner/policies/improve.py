"""Exact plans: schedule decisions, replay them, and try what the replay shows, as long as that makes the plan better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.errors import InfeasiblePlanError
from planner.policies.effort import effort_of
from planner.problem import Decision, Decisions, Problem, copies_out
from planner.schedule import (
    ReplayedPlan,
    StageClock,
    block_exchanges,
    evict_furthest,
    prune,
    schedule,
    tier_exchanges,
    user_code_proposals,
)

__all__ = ["around_user_code", "exact_candidates", "with_other_blocks", "with_other_tiers"]


def exact_candidates(problem: Problem, start: Decisions, write_weight: float) -> list[ReplayedPlan]:
    """The decisions made feasible: once with all the moves that they ask for, once with only the moves that the budget needs.

    Raises InfeasiblePlanError where the lower tiers are too small.
    """
    effort = effort_of(problem.stage_count)
    filled = evict_furthest(problem, start, early=True, spread=True)
    pruned = prune(problem, filled, _copy_costs(problem, filled))
    first = _best_schedule(problem, filled, write_weight, leads=effort.leads, rounds=effort.rounds)
    if pruned == filled:
        return [first]
    return [first, _best_schedule(problem, pruned, write_weight, leads=(first.lead,), rounds=effort.rounds)]


def _best_schedule(
    problem: Problem, decisions: Decisions, write_weight: float, *, leads: Sequence[float], rounds: int
) -> ReplayedPlan:
    """Schedule by the ideal clock, replay, schedule again by the replayed clock, and so on. Keep the best.

    Longer leads are tried first, and of equal plans the first is kept: a lead absorbs delays that were not measured.
    """
    best: ReplayedPlan | None = None
    known: set[tuple[tuple[int, int], ...]] = set()
    for lead in leads:
        clock = StageClock.ideal(problem)
        for _ in range(rounds):
            scheduled = schedule(problem, decisions, clock, lead=lead)
            starts = tuple((index, decision.start) for index, decision in scheduled.items())
            if starts in known:
                break  # the replay would give the same clock again
            known.add(starts)
            candidate = ReplayedPlan.of(problem, scheduled, write_weight)
            if best is None or candidate.cost < best.cost:
                best = replace(candidate, lead=lead)
            if candidate.timeline.stall_seconds <= 1e-6 * candidate.timeline.iteration_seconds:
                break
            clock = candidate.clock
    assert best is not None  # there is at least one lead and one round
    return best


def _copy_costs(problem: Problem, decisions: Decisions) -> dict[int, float]:
    """Return the seconds that each move costs, by period."""
    copied_out = copies_out(problem, decisions)
    return {index: _cost(problem, index, decision, out=index in copied_out) for index, decision in decisions.items()}


def _cost(problem: Problem, index: int, decision: Decision, *, out: bool) -> float:
    """Seconds of the copy in. For a final period, which has none, seconds of the copy out."""
    route, period = problem.route(decision.tier), problem.periods[index]
    if period.final:
        return route.outward.seconds(period.size_bytes) if out else 0.0
    return route.inward.seconds(period.size_bytes)


def around_user_code(best: ReplayedPlan) -> ReplayedPlan:
    """Look for better starts of the copies that user code waits for, as long as some are found.

    Each one is replayed, so the result is never slower.
    """
    effort = effort_of(best.problem.stage_count)
    for _ in range(effort.improvements):
        tried = [(best.problem, schedule(best.problem, best.decisions, best.clock, lead=lead)) for lead in effort.all_leads]
        tried += user_code_proposals(best)
        better = min((ReplayedPlan.of(*each, best.write_weight) for each in tried), key=lambda candidate: candidate.cost)
        if better.cost >= best.cost * effort.better:
            break
        best = replace(better, lead=best.lead)
    return best


def with_other_tiers(best: ReplayedPlan) -> ReplayedPlan:
    """Try other reserves, and other tiers for blocks for which stages wait, as long as that makes the plan better."""
    effort, problem = effort_of(best.problem.stage_count), best.problem
    for _ in range(effort.improvements):
        better = best
        variants = [(best.decisions, lead) for lead in effort.all_leads]
        variants += [(decisions, best.lead) for decisions in tier_exchanges(best)]
        for decisions, lead in variants:
            try:
                tried = ReplayedPlan.of(problem, schedule(problem, decisions, best.clock, lead=lead), best.write_weight)
            except InfeasiblePlanError:
                continue  # a lower tier is too full
            if tried.cost < better.cost:
                better = replace(tried, lead=lead)
        if better.cost >= best.cost * effort.better:
            break
        best = better
    return best


def with_other_blocks(best: ReplayedPlan) -> ReplayedPlan:
    """Try other blocks around the copies that the iteration waits for, and go on from each variant that is better.

    Ends when none is, or after a counted number of replays.
    """
    effort = effort_of(best.problem.stage_count)
    left = min(effort.exchanges, effort.exchanged_stages // best.problem.stage_count)
    known = {frozenset(best.decisions.items())}
    better: ReplayedPlan | None = best
    while better is not None:
        best, better = better, None
        for decisions in block_exchanges(best, effort.breadth):
            key = frozenset(decisions.items())
            if key in known:
                continue
            if left == 0:
                break
            left -= 1
            known.add(key)
            try:
                tried = ReplayedPlan.of(best.problem, decisions, best.write_weight)
            except InfeasiblePlanError:
                continue  # a lower tier is too full
            if tried.cost < best.cost * effort.better:
                better = replace(tried, lead=best.lead)
                break
    return best
