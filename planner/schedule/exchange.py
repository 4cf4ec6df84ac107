"""Other tiers for blocks that come back late, and other subgroups to update on the host: variants to try, the replay decides.

Coarse time does not see which block of a stage comes last. The replay does. A stage that waits for a drive may not wait for host
memory, and the other way. So the blocks for which stages wait longest change their tier, alone or in exchange for blocks of the
other tier that come back long before they are used.

Nor does coarse time see when within a segment a parameter is back, and its relaxed solution shares one update among many
subgroups. So a subgroup that stages wait for long is left to the device, alone or for another one whose parameters are needed
later, or one more updates on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.problem import Decisions, Problem, host_updatable, needed_again
from planner.schedule.replayed import CopyIn, ReplayedPlan
from planner.schema import Subgroup, WaitingTier

__all__ = ["tier_exchanges", "update_exchanges"]

_LIKE = 1.5
"""Blocks whose sizes differ by a larger factor are not exchanged, nor subgroups whose updates take times that do."""
_FEW = 2
"""So many subgroups are exchanged, each alone, and so many of different sizes are added."""


def tier_exchanges(made: ReplayedPlan) -> Iterator[Decisions]:
    """Yield variants of the decisions in which the blocks that stages wait for longest come from another tier.

    Where to begin the prefetches is not decided anew. A lower tier may be too
    full for a variant. Yields nothing with one tier, or where no stage waits for a copy in.
    """
    problem, decisions = made.problem, made.decisions
    if len(problem.routes) < 2:
        return
    copies = made.copies_in()
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


def update_exchanges(made: ReplayedPlan) -> Iterator[frozenset[int]]:
    """Yield other sets of subgroups (ids) to update on the host, the most promising first. The host tier may be too full."""
    trace, on_host = made.problem.source, frozenset(made.problem.on_host)
    subgroups = {subgroup.id: subgroup for subgroup in host_updatable(trace)}
    latest = sorted(subgroups.keys() - on_host, key=lambda number: -needed_again(trace, subgroups[number]))
    worst = _by_lateness(made)[:_FEW]
    for number in worst:
        other = next((each for each in latest if _alike(subgroups[each], subgroups[number])), None)
        if other is not None:
            yield on_host - {number} | {other}
    yield from (on_host - {number} for number in worst[:1])
    added: list[Subgroup] = []
    for subgroup in map(subgroups.__getitem__, latest):
        if len(added) < _FEW and not any(_alike(subgroup, each) for each in added):
            added.append(subgroup)
            yield on_host | {subgroup.id}


def _by_lateness(made: ReplayedPlan) -> list[int]:
    """The subgroups that update on the host: first those that stages wait for longest, then those with the least slack."""
    problem = made.problem
    owners = {block: number for number in problem.on_host for block in problem.source.subgroups[number].blocks}
    waited = dict.fromkeys(problem.on_host, 0.0)
    slack = dict.fromkeys(problem.on_host, made.timeline.iteration_seconds)
    for copy in made.copies_in():
        owner = owners.get(problem.periods[copy.index].block)
        if owner is not None:
            waited[owner] += copy.wait_seconds
            slack[owner] = min(slack[owner], copy.slack_seconds)
    return sorted(problem.on_host, key=lambda number: (-waited[number], slack[number], number))


def _alike(one: Subgroup, other: Subgroup) -> bool:
    assert one.host_seconds is not None and other.host_seconds is not None  # both can update on the host
    return one.host_seconds <= other.host_seconds * _LIKE and other.host_seconds <= one.host_seconds * _LIKE
