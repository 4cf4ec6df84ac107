"""Other blocks leave, or at other stages: variants of a plan around the copies that its iteration waits for.

The integer program divides blocks, and counts time in segments. A few bytes that are missing cost it little, where in truth a
whole block must leave. The replay shows that: the copies that the iteration waits for are on its critical path. For each of them
there are variants to try, and the replay decides:

* the block stays, and another one leaves instead;
* it leaves later, after other copies out;
* another block leaves as well, so that the stage after the copy out need not wait, or the copy in can begin earlier;
* it leaves in an earlier period as well, and its copy is still valid then;
* its prefetch is queued at another stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from planner.errors import InfeasiblePlanError
from planner.problem import Decision, Decisions, Problem
from planner.schedule.moves import evict_furthest, on_demand, prefetch_from, prune, schedule
from planner.schedule.replayed import ReplayedPlan
from planner.schema import WaitingTier
from planner.simulator import critical_path

_MAX_COPIES = 12  # periods whose copies are exchanged: those that are on the critical path for longest


@dataclass(frozen=True, slots=True, kw_only=True)
class Breadth:
    """How many variants there are for a copy.

    `others`: blocks to try in its place, or beside it. `stages`: other stages to try for a copy out, and for a prefetch. `leads`:
    reserves of prefetches, see `schedule`. `thorough`: also variants that help short iterations only.
    """

    others: int
    stages: int
    leads: Sequence[float]
    thorough: bool


def block_exchanges(made: ReplayedPlan, breadth: Breadth) -> Iterator[Decisions]:
    """Yield variants of the decisions, with the starts of all prefetches.

    All variants fit into the device budget at every stage; a lower tier may be too full for one. Yields nothing where no copy is
    on the critical path. Some variants may be equal.
    """
    problem, decisions = made.problem, made.decisions
    for index in _critical(made)[:_MAX_COPIES]:
        for changed in (*_instead(problem, decisions, index, breadth), *_later(problem, decisions, index, breadth)):
            for lead in breadth.leads:
                yield schedule(problem, changed, made.clock, lead=lead)
        if breadth.thorough:
            yield from _room_for_the_next_stage(problem, decisions, index, breadth)
            yield from _copied_earlier(problem, decisions, index)
        if not problem.periods[index].final:
            yield from _room_for_the_copy_in(problem, decisions, index, breadth)
            yield from _other_starts(problem, decisions, index, breadth)


def _critical(made: ReplayedPlan) -> list[int]:
    """Periods whose copies are on the critical path, the longest first."""
    seconds: dict[int, float] = {}
    for segment in critical_path(made.problem.source, made.plan, made.timeline):
        if segment.block is not None:
            index = made.problem.period_after.get((segment.block, made.plan.moves[segment.index].after))
            if index is not None:  # gradients of updates on the host have no period
                seconds[index] = seconds.get(index, 0.0) + segment.seconds
    return sorted(seconds, key=lambda index: (-seconds[index], index))


def _instead(problem: Problem, decisions: Decisions, index: int, breadth: Breadth) -> Iterator[Decisions]:
    """The block stays. Where there is no room for it, another one leaves; what is still missing then, by Belady's rule.

    Once with all moves that there were before, once with only those that the budget needs.
    """
    if index in problem.updated:
        return
    staying = on_demand(problem, {each: decision for each, decision in decisions.items() if each != index})
    missing = [size - problem.budgets.device_bytes for size in problem.occupancy(staying)]
    crowded = [stage for stage, size in enumerate(missing) if size > 0]
    others = _others(problem, decisions, crowded, max(missing), breadth)
    for start in (staying, *(_leaving(problem, staying, other, decisions[index].tier) for other in others)):
        try:
            filled = evict_furthest(problem, start, early=True, spread=True, kept=(index,))
        except InfeasiblePlanError:
            continue  # nothing else can leave
        yield filled
        if breadth.thorough:
            yield prune(problem, filled, {each: float(problem.periods[each].size_bytes) for each in filled})


def _later(problem: Problem, decisions: Decisions, index: int, breadth: Breadth) -> Iterator[Decisions]:
    """The block leaves at a later stage, if there is room for it until then."""
    occupied, period, decision = problem.occupancy(on_demand(problem, decisions)), problem.periods[index], decisions[index]
    for leave in islice(range(decision.leave + 1, period.last_leave + 1), breadth.stages):
        if occupied[leave % problem.stage_count] + period.size_bytes > problem.budgets.device_bytes:
            return
        yield {**decisions, index: replace(decision, leave=leave)}


def _room_for_the_next_stage(problem: Problem, decisions: Decisions, index: int, breadth: Breadth) -> Iterator[Decisions]:
    """Another block is away when the block leaves. It comes back as late as it can, or while the next stage runs."""
    stage = (decisions[index].leave + 1) % problem.stage_count
    size = problem.periods[index].size_bytes
    missing = problem.occupancy(decisions)[stage] + size - problem.budgets.device_bytes
    starts = {each: decision.start for each, decision in decisions.items()}
    for other in _others(problem, decisions, [stage], missing, breadth):
        changed = _leaving(problem, decisions, other, decisions[index].tier)
        yield prefetch_from(problem, changed, starts)
        after = problem.periods[other].after
        if not problem.periods[other].final:
            yield prefetch_from(problem, changed, {**starts, other: stage if stage > after else stage + problem.stage_count})


def _copied_earlier(problem: Problem, decisions: Decisions, index: int) -> Iterator[Decisions]:
    """The block leaves and comes back in an earlier period, too."""
    period = problem.periods[index]
    starts = {each: decision.start for each, decision in decisions.items()}
    for other in problem.periods_of[period.block]:
        earlier = problem.periods[other]
        if other not in decisions and earlier.epoch == period.epoch and earlier.rank < period.rank:
            changed = _leaving(problem, decisions, other, decisions[index].tier)
            yield prefetch_from(problem, changed, {**starts, other: earlier.after + 1})


def _room_for_the_copy_in(problem: Problem, decisions: Decisions, index: int, breadth: Breadth) -> Iterator[Decisions]:
    """Another block is away at the last stage before the prefetch in which there is no room for the block."""
    occupied, decision, stages = problem.occupancy(decisions), decisions[index], problem.stage_count
    free = problem.budgets.device_bytes - problem.periods[index].size_bytes
    stage = next((stage for stage in range(decision.start - 1, decision.leave, -1) if occupied[stage % stages] > free), None)
    if stage is None:
        return
    starts = {each: decision.start for each, decision in decisions.items()}
    for other in _others(problem, decisions, [stage % stages], occupied[stage % stages] - free, breadth):
        changed = _leaving(problem, decisions, other, decision.tier)
        for start in (decision.leave + 1, stage):
            yield prefetch_from(problem, changed, {**starts, index: start})


def _other_starts(problem: Problem, decisions: Decisions, index: int, breadth: Breadth) -> Iterator[Decisions]:
    """The prefetch is queued at another stage, the nearest ones first."""
    period, decision = problem.periods[index], decisions[index]
    starts = {each: decision.start for each, decision in decisions.items()}
    stages = sorted(range(decision.leave + 1, period.before + 1), key=lambda stage: abs(stage - decision.start))
    for start in stages[1 : 1 + breadth.stages]:
        yield prefetch_from(problem, decisions, {**starts, index: start})


def _others(problem: Problem, decisions: Decisions, stages: Collection[int], missing_bytes: int, breadth: Breadth) -> list[int]:
    """Periods around one of `stages` in which the block stays so far: those about as large as what is missing."""
    found = {index for stage in stages for index in problem.covering(stage) if index not in decisions}
    return sorted(found, key=lambda index: (abs(problem.periods[index].size_bytes - missing_bytes), index))[: breadth.others]


def _leaving(problem: Problem, decisions: Decisions, index: int, tier: WaitingTier) -> Decisions:
    """The decisions, and the block of one more period leaves, to `tier` if it may wait there."""
    period, tiers = problem.periods[index], [route.tier for route in problem.routes_of(index)]
    chosen = tier if tier in tiers else tiers[0]
    return {**decisions, index: Decision(tier=chosen, leave=period.after, start=period.before)}
