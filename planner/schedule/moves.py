"""Which blocks leave where a stage has no room, and when each copy in starts.

Blocks leave whose next use is furthest in the future (Belady's rule). A copy in starts late enough that it fits, and early enough
that no stage waits for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import inf

import numpy as np

from planner.errors import InfeasiblePlanError, exact_bytes
from planner.problem import Decision, Decisions, Problem, TierCapacity, user_stages
from planner.schedule.replayed import StageClock
from planner.schema import WaitingTier


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
    leaves = np.full(len(problem.periods), inf)  # after which stage the block of a period leaves
    for index, decision in result.items():
        leaves[index] = decision.leave
    for stage in range(stages):
        if occupied[stage] <= budget:
            continue
        for index, position in _furthest_first(problem, leaves, stage):
            if index in kept:
                continue
            old = result.get(index)
            tier = old.tier if old else room.least_busy(index) if spread else room.best(index)
            if tier is None:
                continue
            period = problem.periods[index]
            # Early, the copy out has all the time there is; late, fewer blocks leave that need not.
            leave = period.after if early else position - 1
            if old is None:
                room.take(index, tier)
            end = old.leave + 1 if old else period.before
            result[index] = Decision(tier=tier, leave=leave, start=old.start if old else period.before)
            leaves[index] = leave
            for freed in range(leave + 1, end):
                occupied[freed % stages] -= period.size_bytes
            if occupied[stage] <= budget:
                break
        else:
            raise InfeasiblePlanError(
                f"stage {problem.trace.stages[stage].name!r} would occupy {exact_bytes(occupied[stage])} on the device, whose "
                f"budget is {exact_bytes(budget)}: the lower tiers have no room for more; raise storage_budget or host_budget",
                stage=problem.trace.stages[stage].name,
            )
    return result


def _furthest_first(problem: Problem, leaves: np.ndarray, stage: int) -> Iterator[tuple[int, int]]:
    """Periods around `stage` whose block is on the device then, with the number of the stage as it is counted in the period.

    leaves: by period, the stage after which its block leaves; infinite where it stays.
    """
    after, before, final = problem.ends
    positions = np.where(after < stage, stage, stage + problem.stage_count)
    found = np.flatnonzero((positions < before) & (leaves >= positions))
    away = np.where(final[found], inf, before[found] - positions[found])
    chosen = found[np.argsort(-away, kind="stable")]
    return zip(chosen.tolist(), positions[chosen].tolist(), strict=True)


def prune(problem: Problem, decisions: Decisions, cost: dict[int, float]) -> Decisions:
    """Take back moves that nothing needs (neither budget nor update on the host nor border), the most expensive first.

    cost: by period.
    """
    result = dict(decisions)
    occupied = problem.occupancy(result)
    budget, count = problem.budgets.device_bytes, problem.stage_count
    for index in sorted(decisions.keys() - problem.updated.keys() - problem.over_the_end, key=lambda i: (-cost[i], i)):
        decision, size = result[index], problem.periods[index].size_bytes
        stages = [stage % count for stage in range(decision.leave + 1, decision.start)]
        if all(occupied[stage] + size <= budget for stage in stages):
            del result[index]
            for stage in stages:
                occupied[stage] += size
    return result


def schedule(problem: Problem, decisions: Decisions, clock: StageClock, *, lead: float) -> Decisions:
    """Choose the stage at which each prefetch is queued.

    Start with all prefetches on demand, which always fit. Then move each one to an earlier stage, earliest deadline first: to
    where it must begin if its link serves all prefetches in order of deadline, with `lead` times its own transfer time as a
    reserve. The budget must hold at every stage that the block then occupies.
    """
    targets: dict[int, int] = {}
    for route in problem.routes:
        targets.update(_latest_starts(problem, decisions, clock, route.tier, lead))
    for index, subgroup in problem.updated.items():
        # Queued earlier, the copy would wait for the update at the head of its queue and hold up the copies behind it.
        updated = clock.stage_at(clock.update_seconds[subgroup])
        targets[index] = min(max(targets[index], updated), problem.periods[index].before)
    return prefetch_from(problem, decisions, targets)


def on_demand(problem: Problem, decisions: Decisions) -> Decisions:
    """Return the same moves, with each prefetch queued at the stage that needs the block."""
    periods = problem.periods
    return {n: Decision(tier=each.tier, leave=each.leave, start=periods[n].before) for n, each in decisions.items()}


def prefetch_from(problem: Problem, decisions: Decisions, targets: dict[int, int]) -> Decisions:
    """Queue each prefetch at its target stage, or as early after it as the budget allows. Without a target, it is on demand.

    Earliest deadlines come first. The block of a prefetch occupies its memory from the stage at which the prefetch is queued.
    """
    result = on_demand(problem, decisions)
    occupied = problem.occupancy(result)
    stages, budget, users = problem.stage_count, problem.budgets.device_bytes, frozenset(user_stages(problem.trace))
    coming = (index for index in targets if not problem.periods[index].final)
    for index in sorted(coming, key=lambda i: (problem.periods[i].before % stages, targets[i])):
        size, start = problem.periods[index].size_bytes, problem.periods[index].before
        # Not before the iteration has begun, where the block is to be away by then: which one comes is not known before.
        least = min(stages + 1, start) if index in problem.over_the_end else 0
        lowest = max(targets[index], result[index].leave + 1, least)
        while start > lowest and occupied[(start - 1) % stages] + size <= budget:
            start -= 1
            occupied[start % stages] += size
        if start < problem.periods[index].before and problem.trace.blocks[problem.periods[index].block].user_visible:
            while start % stages in users and start < problem.periods[index].before:
                occupied[start % stages] -= size  # user code holds it back, and it would hold up the copies behind it
                start += 1
        result[index] = Decision(tier=result[index].tier, leave=result[index].leave, start=start)
    return result


def _latest_starts(problem: Problem, decisions: Decisions, clock: StageClock, tier: WaitingTier, lead: float) -> dict[int, int]:
    """For each period of one tier: the latest stage at which its prefetch may be queued and still be in time."""
    link, stages = problem.route(tier).inward, problem.stage_count
    mine = [index for index, decision in decisions.items() if decision.tier == tier and not problem.periods[index].final]
    mine.sort(key=lambda index: -(problem.periods[index].before % stages))
    begin_next = float("inf")
    starts: dict[int, int] = {}
    # Backwards over two iterations, so that prefetches early in the iteration see the queue of the one before.
    for turn in (1, 0):
        for index in mine:
            period = problem.periods[index]
            shift = turn * stages - (period.before // stages) * stages
            seconds = clock.copy_seconds.get(index) or link.seconds(period.size_bytes)
            finish = min(clock.time(period.before + shift), begin_next)
            earliest = clock.time(decisions[index].leave + 1 + shift)
            begin_next, lowest = max(finish - seconds, earliest), None
            if problem.trace.blocks[period.block].user_visible:
                begin_next, lowest = _around_user_code(clock, begin_next, seconds, earliest)
            start = clock.stage_at(begin_next - lead * seconds)
            starts[index] = (start if lowest is None else max(start, lowest)) - shift
    return starts


def _around_user_code(clock: StageClock, begin: float, seconds: float, earliest: float) -> tuple[float, int | None]:
    """Return when a copy in must begin at the latest so as not to run during user code, and the first stage to queue it at.

    The first stage follows the last user code before the copy; None if there is no such user code.
    """
    user = clock.last_user_stage(begin + seconds)
    while user is not None and clock.time(user + 1) > begin:
        before = clock.time(user) - seconds  # it ends before user code if there is time for that, else it begins after it
        if before < earliest:
            return clock.time(user + 1), user + 1
        begin, user = before, clock.last_user_stage(before + seconds)
    # Queued earlier, the copy could be under way in the user code before it.
    return begin, None if user is None else user + 1
