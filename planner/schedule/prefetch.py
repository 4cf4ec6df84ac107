"""When each copy in starts: late enough that it fits, and early enough that no stage waits for it."""

from __future__ import annotations

from dataclasses import replace

from planner.problem import Decisions, Problem, user_stages
from planner.schedule.replayed import StageClock
from planner.schema import WaitingTier

__all__ = ["on_demand", "prefetch_from", "schedule"]


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
    return {index: replace(decision, start=problem.periods[index].before) for index, decision in decisions.items()}


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
        lowest = max(targets[index], result[index].leave + 1)
        while start > lowest and occupied[(start - 1) % stages] + size <= budget:
            start -= 1
            occupied[start % stages] += size
        if start < problem.periods[index].before and problem.trace.blocks[problem.periods[index].block].user_visible:
            while start % stages in users and start < problem.periods[index].before:
                occupied[start % stages] -= size  # user code holds it back, and it would hold up the copies behind it
                start += 1
        result[index] = replace(result[index], start=start)
    return result


def _latest_starts(problem: Problem, decisions: Decisions, clock: StageClock, tier: WaitingTier, lead: float) -> dict[int, int]:
    """For each period of one tier: the latest stage at which its prefetch may be queued and still be in time.

    Goes backwards over two iterations, so that prefetches early in the iteration see the queue of the one before.
    """
    link, stages = problem.route(tier).inward, problem.stage_count
    mine = [index for index, decision in decisions.items() if decision.tier == tier and not problem.periods[index].final]
    mine.sort(key=lambda index: -(problem.periods[index].before % stages))
    begin_next = float("inf")
    starts: dict[int, int] = {}
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

    It begins early enough to end before user code if there is time for that, otherwise after it. The first stage follows the
    last user code before the copy: queued earlier, the copy could be under way in that user code. None if there is no such user
    code.
    """
    user = clock.last_user_stage(begin + seconds)
    while user is not None and clock.time(user + 1) > begin:
        before = clock.time(user) - seconds
        if before < earliest:
            return clock.time(user + 1), user + 1
        begin, user = before, clock.last_user_stage(before + seconds)
    return begin, None if user is None else user + 1
