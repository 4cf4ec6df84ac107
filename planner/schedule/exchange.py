"""Other tiers for blocks that come back late: a stage that waits for a drive may not wait for host memory, and the other way.

Coarse time does not see which block of a stage comes last. The replay does. The blocks for which stages wait longest change their
tier, alone or in exchange for blocks of the other tier that come back long before they are used. These are variants to try: the
replay decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.problem import Decisions, Problem
from planner.schedule.copies_in import CopyIn, copies_in
from planner.schema import Plan, WaitingTier
from planner.simulator import Timeline

__all__ = ["tier_exchanges"]

_LIKE = 1.5
"""Blocks whose sizes differ by a larger factor are not exchanged."""


def tier_exchanges(problem: Problem, decisions: Decisions, plan: Plan, timeline: Timeline) -> Iterator[Decisions]:
    """Yield variants of `decisions` in which the blocks that stages wait for longest come from another tier.

    `plan` is their plan, and `timeline` its replay. Where to begin the prefetches is not decided anew. A lower tier may be too
    full for a variant. Yields nothing with one tier, or where no stage waits for a copy in.
    """
    if len(problem.routes) < 2:
        return
    copies = list(copies_in(problem, plan, timeline))
    late = sorted((copy for copy in copies if copy.wait_seconds > 0), key=lambda copy: -copy.wait_seconds)
    early = sorted((copy for copy in copies if copy.slack_seconds > 0), key=lambda copy: -copy.slack_seconds)
    for count in sorted({len(late), (len(late) + 3) // 4, min(len(late), 4), 1} if late else (), reverse=True):
        for swap in (True, False):
            changed = _changed(problem, decisions, late[:count], early if swap else [])
            if changed != decisions:
                yield changed


def _changed(problem: Problem, decisions: Decisions, late: list[CopyIn], early: list[CopyIn]) -> Decisions:
    """Let the blocks of `late` wait in another tier. Where `early` is given, each for a block that comes from there instead."""
    result = dict(decisions)
    free = {copy.index for copy in early}
    for copy in late:
        tier = result[copy.index].tier
        other = next((route.tier for route in problem.routes_of(copy.index) if route.tier != tier), None)
        if other is None or tier != decisions[copy.index].tier:
            continue
        if early:
            partner = next((each for each in early if each.index in free and _fits(problem, result, copy, each, other)), None)
            if partner is None:
                continue
            free.discard(partner.index)
            _move(problem, result, partner.index, tier)
        _move(problem, result, copy.index, other)
    return result


def _fits(problem: Problem, decisions: Decisions, late: CopyIn, early: CopyIn, tier: WaitingTier) -> bool:
    """Whether the block of `early` waits in `tier`, is about as large, and would be in time from the tier of `late`."""
    target = decisions[late.index].tier
    mine, its = problem.periods[late.index].size_bytes, problem.periods[early.index].size_bytes
    return (
        decisions[early.index].tier == tier
        and any(route.tier == target for route in problem.routes_of(early.index))
        and mine / _LIKE <= its <= mine * _LIKE
        and early.slack_seconds > problem.route(target).inward.seconds(its)
    )


def _move(problem: Problem, decisions: Decisions, index: int, tier: WaitingTier) -> None:
    """Change the tier of a period, and of all others that share its copies out."""
    period = problem.periods[index]
    old = decisions[index].tier
    for other in [each for each in problem.periods_of(period.block) if each in decisions]:
        same = problem.periods[other].epoch == period.epoch and not period.read_only
        if other == index or (same and decisions[other].tier == old):
            decisions[other] = replace(decisions[other], tier=tier)
