"""Other starts for the copies that user code would wait for: after the user code, they run beside the next region.

The blocks then take room for longer, and the wait may move elsewhere. So these are only variants to try: the replay decides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from planner.problem import Decisions, Problem, next_user_stage, user_stages
from planner.schedule.replayed import ReplayedPlan

__all__ = ["user_code_proposals"]

_MAX_APART = 3
"""At most this many stages of user code get a variant of their own, in which only the copies that they wait for are put off."""


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
