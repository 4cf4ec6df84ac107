"""Exact plans: schedule decisions, replay them, and try what the replay shows, as long as that makes the plan better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.errors import InfeasiblePlanError
from planner.ilp import MAX_INTEGER_STAGES
from planner.policies.decisions import copy_costs
from planner.problem import Decisions, Problem, build_plan, outward_weight
from planner.schedule import (
    Breadth,
    StageClock,
    block_exchanges,
    evict_furthest,
    prune,
    schedule,
    tier_exchanges,
    user_code_proposals,
)
from planner.schema import Plan
from planner.simulator import Timeline, simulate

__all__ = ["ReplayedPlan", "around_user_code", "exact_candidates", "replayed", "with_other_blocks", "with_other_tiers"]

_BETTER = 0.9999
_MAX_ROUNDS = 3
"""How often a schedule is made again by the clock of its replay."""
_FEW_ROUNDS = 2
_MAX_IMPROVEMENTS = 6
"""How often a plan is improved around user code, or by other tiers."""
_LEADS = (3.0, 1.0, 0.0)
"""Reserves of prefetches, in units of their own transfer time."""
_USUAL_LEAD = 1.0
_MAX_EXCHANGES = 300
"""Variants with other blocks that are replayed."""
_MAX_EXCHANGED_STAGES = 20_000
"""In long iterations, fewer: their stages together are at most so many."""
_BROAD = Breadth(others=6, stages=6, leads=(_USUAL_LEAD, 0.0), thorough=True)
_NARROW = Breadth(others=1, stages=1, leads=(_USUAL_LEAD,), thorough=False)
"""For long iterations: there it is better to try little for many copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedPlan:
    """A plan with its replay.

    `cost`: iteration seconds, plus what its copies out are worth. `lead`: the reserve of its prefetches.
    """

    problem: Problem
    decisions: Decisions
    plan: Plan
    timeline: Timeline
    cost: float
    lead: float = 0.0


def exact_candidates(problem: Problem, start: Decisions, write_weight: float) -> list[ReplayedPlan]:
    """The decisions made feasible: once with all the moves that they ask for, once with only the moves that the budget needs.

    Long iterations: with the usual reserve only. Raises InfeasiblePlanError where the lower tiers are too small.
    """
    filled = evict_furthest(problem, start, early=True, spread=True)
    pruned = prune(problem, filled, copy_costs(problem, filled))
    leads, rounds = (_LEADS, _MAX_ROUNDS) if problem.stage_count <= MAX_INTEGER_STAGES else ((_USUAL_LEAD,), _FEW_ROUNDS)
    first = _best_schedule(problem, filled, write_weight, leads=leads, rounds=rounds)
    if pruned == filled:
        return [first]
    return [first, _best_schedule(problem, pruned, write_weight, leads=(first.lead,), rounds=rounds)]


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
            candidate = replayed(problem, scheduled, write_weight)
            if best is None or candidate.cost < best.cost:
                best = replace(candidate, lead=lead)
            if candidate.timeline.stall_seconds <= 1e-6 * candidate.timeline.iteration_seconds:
                break
            clock = StageClock.replayed(problem, candidate.plan, candidate.timeline)
    assert best is not None  # there is at least one lead and one round
    return best


def replayed(problem: Problem, decisions: Decisions, write_weight: float) -> ReplayedPlan:
    plan = build_plan(problem, decisions, policy="")
    timeline = simulate(problem.source, plan)
    cost = timeline.iteration_seconds
    for route in problem.routes:
        written_seconds = timeline.moved_bytes.get(route.outward.name, 0) / route.outward.bytes_per_second
        cost += outward_weight(route.tier, write_weight) * written_seconds
    return ReplayedPlan(problem=problem, decisions=decisions, plan=plan, timeline=timeline, cost=cost)


def around_user_code(best: ReplayedPlan, write_weight: float) -> ReplayedPlan:
    """Look for better starts of the copies that user code waits for, as long as some are found.

    Each one is replayed, so the result is never slower.
    """
    for _ in range(_MAX_IMPROVEMENTS):
        clock = StageClock.replayed(best.problem, best.plan, best.timeline)
        tried = [(best.problem, schedule(best.problem, best.decisions, clock, lead=lead)) for lead in _LEADS]
        tried += user_code_proposals(best.problem, best.decisions, best.plan, best.timeline)
        better = min((replayed(*each, write_weight) for each in tried), key=lambda candidate: candidate.cost)
        if better.cost >= best.cost * _BETTER:
            break
        best = replace(better, lead=best.lead)
    return best


def with_other_tiers(best: ReplayedPlan, write_weight: float) -> ReplayedPlan:
    """Try other reserves, and other tiers for blocks for which stages wait, as long as that makes the plan better."""
    for _ in range(_MAX_IMPROVEMENTS):
        clock = StageClock.replayed(best.problem, best.plan, best.timeline)
        better = best
        variants = [(best.decisions, lead) for lead in _LEADS]
        exchanges = tier_exchanges(best.problem, best.decisions, best.plan, best.timeline)
        variants += [(decisions, best.lead) for decisions in exchanges]
        for decisions, lead in variants:
            try:
                tried = replayed(best.problem, schedule(best.problem, decisions, clock, lead=lead), write_weight)
            except InfeasiblePlanError:
                continue  # a lower tier is too full
            if tried.cost < better.cost:
                better = replace(tried, lead=lead)
        if better.cost >= best.cost * _BETTER:
            break
        best = better
    return best


def with_other_blocks(best: ReplayedPlan, write_weight: float) -> ReplayedPlan:
    """Try other blocks around the copies that the iteration waits for, and go on from each variant that is better.

    Ends when none is, or after a counted number of replays.
    """
    stages = best.problem.stage_count
    breadth = _BROAD if stages <= MAX_INTEGER_STAGES else _NARROW
    left = min(_MAX_EXCHANGES, _MAX_EXCHANGED_STAGES // stages)
    known = {frozenset(best.decisions.items())}
    better: ReplayedPlan | None = best
    while better is not None:
        best, better = better, None
        for decisions in block_exchanges(best.problem, best.decisions, best.plan, best.timeline, breadth):
            key = frozenset(decisions.items())
            if key in known:
                continue
            if left == 0:
                break
            left -= 1
            known.add(key)
            try:
                tried = replayed(best.problem, decisions, write_weight)
            except InfeasiblePlanError:
                continue  # a lower tier is too full
            if tried.cost < best.cost * _BETTER:
                better = replace(tried, lead=best.lead)
                break
    return best
