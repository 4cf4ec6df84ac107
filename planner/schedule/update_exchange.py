"""Other subgroups to update on the host: the replay tells which of them stages wait for.

Coarse time does not see when within a segment a parameter is back, and its relaxed solution shares one update among many
subgroups. So a subgroup that stages wait for long is left to the device, alone or for another one whose parameters are needed
later, or one more updates on the host. These are variants to try: the replay decides.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.problem import Problem, host_updatable, needed_again
from planner.schedule.copies_in import copies_in
from planner.schema import Plan, Subgroup
from planner.simulator import Timeline

__all__ = ["update_exchanges"]

_LIKE = 1.5
"""Subgroups whose updates take times that differ by a larger factor are not exchanged."""
_FEW = 2
"""So many subgroups are exchanged, each alone, and so many of different sizes are added."""


def update_exchanges(problem: Problem, plan: Plan, timeline: Timeline) -> Iterator[frozenset[int]]:
    """Yield other sets of subgroups (ids) to update on the host than those of `problem`, the most promising first.

    `plan` is for `problem`, and `timeline` its replay. The host tier may be too full for a set.
    """
    trace = problem.source
    subgroups = {subgroup.id: subgroup for subgroup in host_updatable(trace)}
    on_host = frozenset(problem.on_host)
    latest = sorted(subgroups.keys() - on_host, key=lambda number: -needed_again(trace, subgroups[number]))
    worst = _by_lateness(problem, plan, timeline)[:_FEW]
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


def _by_lateness(problem: Problem, plan: Plan, timeline: Timeline) -> list[int]:
    """The subgroups that update on the host: first those that stages wait for longest, then those with the least slack."""
    owners = {block: number for number in problem.on_host for block in problem.source.subgroups[number].blocks}
    waited = dict.fromkeys(problem.on_host, 0.0)
    slack = dict.fromkeys(problem.on_host, timeline.iteration_seconds)
    for copy in copies_in(problem, plan, timeline):
        owner = owners.get(problem.periods[copy.index].block)
        if owner is not None:
            waited[owner] += copy.wait_seconds
            slack[owner] = min(slack[owner], copy.slack_seconds)
    return sorted(problem.on_host, key=lambda number: (-waited[number], slack[number], number))


def _alike(one: Subgroup, other: Subgroup) -> bool:
    assert one.host_seconds is not None and other.host_seconds is not None  # both can update on the host
    return one.host_seconds <= other.host_seconds * _LIKE and other.host_seconds <= one.host_seconds * _LIKE
