"""Replay a plan exactly, event by event. Every plan is judged by this replay, which shares no code with the integer program.

[Note: execution semantics] The runtime follows these rules too.

* Stage s is *reached* when stage s − 1 has ended. At that instant these things happen, in this order: dead blocks and the
  workspace of s − 1 are freed; blocks whose move has no offload are dropped; offloads with start s − 1 are queued; prefetches
  with start s are queued (each queue in the order of the plan's moves). Then s waits until it can start.
* s starts when its inputs are resident and its outputs and workspace fit. From the time it is reached, its outputs and workspace
  count as taken whenever a prefetch asks for room: no prefetch takes the room that the next stage needs.
* A link serves its queue strictly in order, one block at a time, latency + size / rate each. A prefetch reserves its memory when
  the link begins it. At the head of the queue it waits for room, and for the block's own copy out.
* A block that is copied out counts until the copy has ended. A copy keeps its place in the lower tier until the block dies; the
  copy of a persistent block keeps it for good. A block may die while its copy out is queued or under way. It then counts and
  keeps its place until the copy has ended, and a stage that makes the block anew waits for that.
* Links that share a rate divide it max-min fairly while more than one of them is past its latency.
* Updates on the host: [Note: updates on the host] in `planner.problem.host_updates`. At the head of its queue, the copy in of a
  parameter waits for the update too.
* Re-runs of recompute groups are stages: [Note: recomputation] in `planner.problem.recompute`.
* User code: [Note: user code] in `planner.problem.user_code`. A stage of phase "user" waits for updates on the host and for
  copies of blocks that user code can reach, and holds back copies in of these blocks.
* The iteration is cyclic. Times are those of the steady state: iterations are replayed until one ends as it began, or two in a
  row agree in the time of every stage, transfer and update. After 32 the last one counts (a link may lag behind only
  slightly in each, or two states may alternate).
"""

from __future__ import annotations

from dataclasses import replace

from planner.errors import PlanError
from planner.problem import spelled_out
from planner.schema import Plan, Trace
from planner.simulator.program import compile_program
from planner.simulator.queues import Links
from planner.simulator.replay import Replay
from planner.simulator.timeline import Timeline, agree, same

__all__ = ["simulate"]

_MAX_ITERATIONS = 32


def simulate(trace: Trace, plan: Plan) -> Timeline:
    """Replay `plan` on `trace` by the rules of [Note: execution semantics].

    Stages are those of `recomputed(trace, plan.recompute)`; blocks that are made anew have the ids of `trace`.

    Raises PlanError when the plan was made for another trace, and when a group cannot run again where the plan says. Raises
    InfeasiblePlanError, naming stage and block, when a move or an update does not fit the trace, a budget is exceeded, the
    iteration is not cyclic, or stages and links wait for each other for ever.
    """
    if plan.trace_fingerprint != trace.fingerprint:
        raise PlanError(f"the plan was made for trace {plan.trace_fingerprint}, but this one is {trace.fingerprint}: plan again")
    source, laid_out = spelled_out(trace, plan)
    replay = Replay(source, laid_out, compile_program(source, laid_out), Links(source.hardware))
    previous, began = None, replay.standing()
    for _ in range(_MAX_ITERATIONS):
        timeline = replay.one_iteration()
        ended = replay.standing()
        if same(began, ended, timeline.iteration_seconds) or (previous is not None and agree(previous, timeline)):
            break
        previous, began = timeline, ended
    if not plan.recompute:
        return timeline
    # The replay numbers blocks as in the iteration with re-runs; the plan and the caller know those of `trace`.
    named = tuple(transfer._replace(block=plan.moves[transfer.move].block) for transfer in timeline.transfers)
    return replace(timeline, transfers=named)
