"""What the simulator predicts for a plan, written into the plan."""

from __future__ import annotations

from planner.bound import lower_bound_seconds, more_instants
from planner.errors import BudgetError
from planner.problem import DEFAULT_WRITE_WEIGHT, Problem
from planner.schedule import StageClock
from planner.schema import Budgets, Plan, Predicted, Trace
from planner.simulator import Timeline, simulate

_TIGHT = 1e-3  # a bound that is within this share of the plan is not worth more time


def with_predictions(problem: Problem, plan: Plan, timeline: Timeline | None = None, *, lower_bound_seconds: float = 0.0) -> Plan:
    """Add the simulator's predictions and, for each offload, the stage by whose end the copy is out.

    timeline: the replay of `plan`, if there is one already. lower_bound_seconds: the lower bound, if it is known already;
    otherwise see `with_lower_bound`.
    """
    if timeline is None:
        timeline = simulate(problem.source, plan)
    predicted = prediction(problem.source, timeline, lower_bound_seconds)
    return plan.model_copy(update={"moves": _with_free_after(problem, plan, timeline), "predicted": predicted})


def prediction(trace: Trace, timeline: Timeline, lower_bound_seconds: float = 0.0) -> Predicted:
    """Return what a replay without re-runs predicts."""
    return Predicted(
        iteration_seconds=timeline.iteration_seconds,
        ideal_seconds=trace.ideal_seconds,
        lower_bound_seconds=lower_bound_seconds,
        stall_seconds=timeline.stall_seconds,
        peak_bytes=timeline.peak_bytes,
        moved_bytes=timeline.moved_bytes,
        storage_written_bytes=timeline.storage_written_bytes,
    )


def with_lower_bound(plan: Plan, trace: Trace, budgets: Budgets, *, threads: int) -> Plan:
    """Add the lower bound on the iteration time of every plan to the predictions; where it is far below, a closer one.

    `threads`: solver's.
    """
    enough, bound = plan.replayed.iteration_seconds * (1 - _TIGHT), plan.replayed.lower_bound_seconds
    if bound >= enough:
        return with_bound(plan, bound)
    try:
        problem = Problem.of(trace, budgets)
        for instants in (*([] if bound else [None]), *more_instants(len(trace.stages))):
            if bound < enough:
                found = lower_bound_seconds(problem, threads=threads, enough_seconds=enough, max_instants=instants)
                bound = max(bound, found)
    except BudgetError:  # only plans with re-runs fit, and no tier can be used
        bound = trace.ideal_seconds
    return with_bound(plan, bound)


def cost_of(plan: Plan, trace: Trace, write_weight: float) -> float:
    """Return the iteration's seconds, plus what copies to drives are worth where that weighs more than usual."""
    cost, link = plan.replayed.iteration_seconds, trace.hardware.link("device", "storage")
    if link is not None and write_weight > DEFAULT_WRITE_WEIGHT:
        cost += write_weight * plan.replayed.storage_written_bytes / link.bytes_per_second
    return cost


def with_bound(plan: Plan, seconds: float) -> Plan:
    """Set the lower bound in the predictions; 0 if it is not known."""
    return plan.model_copy(update={"predicted": plan.replayed.model_copy(update={"lower_bound_seconds": seconds})})


def _with_free_after(problem: Problem, plan: Plan, timeline: Timeline) -> tuple[object, ...]:
    clock = StageClock(
        reached_seconds=tuple(stage.start_seconds for stage in timeline.stages), iteration_seconds=timeline.iteration_seconds
    )
    moves = list(plan.moves)
    for transfer in timeline.transfers:
        move = moves[transfer.move]
        if move.offload is None or not transfer.link.startswith("device->"):
            continue
        # Count from when the transfer was queued, since that may have been in the iteration before.
        queued = timeline.stages[move.offload.start % problem.stage_count].end_seconds
        done = queued + transfer.end_seconds - transfer.queued_seconds
        turns = move.offload.start // problem.stage_count
        stage = clock.stage_at(done - 1e-12) + turns * problem.stage_count
        free_after = min(max(stage, move.offload.start), move.before - 1)
        moves[transfer.move] = move.model_copy(update={"offload": move.offload.model_copy(update={"free_after": free_after})})
    return tuple(moves)
