"""Make room at stages that have none: evict the blocks whose next use is furthest in the future (Belady's rule)."""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from planner.errors import InfeasiblePlanError
from planner.problem import Decision, Decisions, InactivePeriod, Problem, TierCapacity

__all__ = ["evict_furthest", "prune"]


def evict_furthest(
    problem: Problem, decisions: Decisions, *, early: bool, spread: bool = False, kept: Collection[int] = ()
) -> Decisions:
    """Add moves until every stage fits. At each stage that does not, blocks with the furthest next use leave first.

    `early`: the block leaves right after its last use. Otherwise it leaves just before the stage that needs the room, as in a
    pager without a plan. `spread`: choose the tier whose link has the least load. Otherwise each block takes the fastest tier
    with room. `kept`: periods in which the block does not leave. Prefetches are on demand. Without `kept`, it succeeds for every
    budget at or above the floor, unless the lower tiers are full. Otherwise raises InfeasiblePlanError, which names the stage.

    Source: L. A. Belady, A study of replacement algorithms for a virtual-storage computer (1966).
    """
    result = dict(decisions)
    room = TierCapacity(problem, result)
    occupied = problem.occupancy(result)
    budget, stages = problem.budgets.device_bytes, problem.stage_count
    for stage in range(stages):
        if occupied[stage] <= budget:
            continue
        for index, position in _furthest_first(problem, result, stage):
            if index in kept:
                continue
            old = result.get(index)
            tier = old.tier if old else room.least_busy(index) if spread else room.best(index)
            if tier is None:
                continue
            period = problem.periods[index]
            leave = period.after if early else position - 1
            if old is None:
                room.take(index, tier)
            end = old.leave + 1 if old else period.before
            result[index] = Decision(tier=tier, leave=leave, start=old.start if old else period.before)
            for freed in range(leave + 1, end):
                occupied[freed % stages] -= period.size_bytes
            if occupied[stage] <= budget:
                break
        else:
            raise InfeasiblePlanError(
                f"stage {problem.trace.stages[stage].name!r} would occupy {occupied[stage]:,} device bytes "
                f"of {budget:,}: the lower tiers have no room for more; raise storage_budget or host_budget",
                stage=problem.trace.stages[stage].name,
            )
    return result


def _furthest_first(problem: Problem, decisions: Decisions, stage: int) -> list[tuple[int, int]]:
    """Periods around `stage` whose block is on the device then, with the number of the stage as it is counted in the period."""
    found = []
    for index in problem.covering[stage]:
        period = problem.periods[index]
        position = stage if period.after < stage else stage + problem.stage_count
        decision = decisions.get(index)
        if decision is None or decision.leave >= position:
            found.append((index, position))
    found.sort(key=lambda entry: (-_stages_until_use(problem.periods[entry[0]], entry[1]), entry[0]))
    return found


def _stages_until_use(period: InactivePeriod, position: int) -> float:
    return inf if period.final else period.before - position


def prune(problem: Problem, decisions: Decisions, cost: dict[int, float]) -> Decisions:
    """Take back moves that neither the budget nor an update on the host needs, the most expensive first (`cost` by period)."""
    result = dict(decisions)
    occupied = problem.occupancy(result)
    budget, count = problem.budgets.device_bytes, problem.stage_count
    for index in sorted(decisions.keys() - problem.updated.keys(), key=lambda i: (-cost[i], i)):
        decision, size = result[index], problem.periods[index].size_bytes
        stages = [stage % count for stage in range(decision.leave + 1, decision.start)]
        if all(occupied[stage] + size <= budget for stage in stages):
            del result[index]
            for stage in stages:
                occupied[stage] += size
    return result
