"""Variants of a plan to try, with other tiers, updates on the host and starts of copies: the replay decides.

Coarse time does not see which block of a stage comes last. The replay does. A stage that waits for a drive may not wait for host
memory, and the other way. So the blocks for which stages wait longest change their tier, alone or in exchange for blocks of the
other tier that come back long before they are used.

Nor does coarse time see when within a segment a parameter is back, and its relaxed solution shares one update among many
subgroups. So a subgroup that stages wait for long is left to the device, alone or for another one whose parameters are needed
later, or one more updates on the host.

Copies that user code would wait for may start after it, and run beside the next region. Their blocks then take room for longer,
and the wait may move elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from planner.problem import Decisions, Problem, host_updatable, needed_again, next_user_stage, user_stages
from planner.schedule.replayed import CopyIn, ReplayedPlan
from planner.schema import Subgroup, WaitingTier

_LIKE = 1.5  # blocks whose sizes differ by a larger factor are not exchanged, nor subgroups whose updates take times that do
_FEW = 2  # so many subgroups are exchanged, each alone, and so many of different sizes are added


def tier_exchanges(made: ReplayedPlan) -> Iterator[Decisions]:
    """Yield variants of the decisions in which the blocks that stages wait for longest come from another tier.

    Where to begin the prefetches is not decided anew. A lower tier may be too full for a variant. Yields nothing with one tier,
    or where no stage waits for a copy in.
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
    for other in [each for each in problem.periods_of[period.block] if each in decisions]:
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


# At most this many stages of user code get a variant of their own, in which only the copies that they wait for are put off.
_MAX_APART = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _LateCopy:
    """A copy out that user code waits for.

    It is queued at the end of stage `leave` and could be queued at the end of `user` instead.

    `index`: its period; None for a gradient of an update on the host, which has no period. `wait_seconds`: how long it is under
    way after `user` was reached. Stages are numbered on over the iteration's end.
    """

    index: int | None
    block: int
    leave: int
    user: int
    wait_seconds: float


def user_code_proposals(made: ReplayedPlan) -> Iterator[tuple[Problem, Decisions]]:
    """Yield variants of the decisions in which user code may wait for less time.

    The given decisions must fit into the device budget at every stage, and all variants do. The problem of a variant differs
    only in when gradients of updates on the host leave. Yields nothing where no stage waits because of user code.
    """
    problem, decisions = made.problem, made.decisions
    late = sorted(_late_copies(made), key=lambda copy: -copy.wait_seconds)
    sooner = _without_copies_in_under_way(made)
    if sooner != decisions:
        yield problem, sooner
    worst = list(dict.fromkeys(copy.user % problem.stage_count for copy in late))
    groups: list[Collection[int]] = [worst, *([user] for user in worst[:_MAX_APART] if len(worst) > 1)]
    for users in groups if late else ():
        chosen = [copy for copy in late if copy.user % problem.stage_count in users]
        for count in sorted({len(chosen), (len(chosen) + 1) // 2, 1}, reverse=True):
            put_off = _put_off(problem, decisions, chosen[:count])
            if put_off is not None:
                yield put_off
                if sooner != decisions:
                    yield put_off[0], {i: replace(d, start=max(d.start, sooner[i].start)) for i, d in put_off[1].items()}


def _late_copies(made: ReplayedPlan) -> Iterator[_LateCopy]:
    problem, timeline = made.problem, made.timeline
    trace, stages = problem.trace, problem.stage_count
    tolerance = 1e-9 * timeline.iteration_seconds
    for transfer in timeline.transfers:
        move = made.plan.moves[transfer.move]
        if move.offload is None or transfer.link.endswith("->device") or not trace.blocks[move.block].user_visible:
            continue
        leave = move.offload.start
        user = next_user_stage(trace, leave + 1)
        index = problem.period_after.get((move.block, move.after))
        back = move.before if index is None else made.decisions[index].start
        if user is None or user >= back or (index is not None and user > problem.periods[index].last_leave):
            continue
        turns = user // stages - leave // stages
        reached = timeline.stages[user % stages].reached_seconds + turns * timeline.iteration_seconds
        done = timeline.stages[leave % stages].end_seconds + transfer.end_seconds - transfer.queued_seconds
        if done > reached + tolerance:
            yield _LateCopy(index=index, block=move.block, leave=leave, user=user, wait_seconds=done - reached)


def _put_off(problem: Problem, decisions: Decisions, late: list[_LateCopy]) -> tuple[Problem, Decisions] | None:
    """Let the copies of `late` leave after their user code where there is room for that; None if there is room for none."""
    occupied, stages, budget = problem.occupancy(decisions), problem.stage_count, problem.budgets.device_bytes
    result, gradients = dict(decisions), dict(problem.gradient_leaves)
    for copy in late:
        size = problem.trace.blocks[copy.block].size_bytes
        longer = [stage % stages for stage in range(copy.leave + 1, copy.user + 1)]
        if any(occupied[stage] + size > budget for stage in longer):
            continue
        for stage in longer:
            occupied[stage] += size
        if copy.index is None:
            gradients[copy.block] = copy.user
        else:
            result[copy.index] = replace(result[copy.index], leave=copy.user)
    if gradients == problem.gradient_leaves and result == decisions:
        return None
    return problem.with_gradient_leaves(gradients), result


def _without_copies_in_under_way(made: ReplayedPlan) -> Decisions:
    """Let the copies in that are under way when user code is reached begin after it."""
    problem, decisions, timeline = made.problem, made.decisions, made.timeline
    trace, stages, length = problem.trace, problem.stage_count, timeline.iteration_seconds
    reached = [(user, timeline.stages[user].reached_seconds) for user in user_stages(trace)]
    tolerance = 1e-9 * length
    result = dict(decisions)
    for transfer in timeline.transfers:
        move = made.plan.moves[transfer.move]
        if not transfer.link.endswith("->device") or not trace.blocks[move.block].user_visible:
            continue
        index = problem.period_after[move.block, move.after]
        for user, time in reached:
            under_way = any(
                transfer.start_seconds < time + turn * length < transfer.end_seconds - tolerance for turn in (-1, 0, 1)
            )
            after = user + 1 + (decisions[index].start - user + stages - 1) // stages * stages
            if under_way and after <= problem.periods[index].before:
                result[index] = replace(result[index], start=after)
    return result
