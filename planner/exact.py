"""From the coarse solution to an exact plan: schedule, replay, improve, keep the best."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from planner.bound import lower_bound_seconds
from planner.classes import classes_of
from planner.errors import InfeasiblePlanError, SolverError
from planner.evict import evict_furthest, prune
from planner.formulation import build_model
from planner.plan import Plan, Predicted, SolverReport
from planner.problem import Decision, Decisions, Problem, build_plan, in_units
from planner.schedule import StageClock, schedule
from planner.segments import segments_of
from planner.simulate import simulate
from planner.solve import Solution, solve
from planner.timeline import Timeline

__all__ = ["finish", "optimise"]

_SEGMENTS = 96
_UNITS_PER_ITERATION = 100.0  # solvers have absolute tolerances: keep numbers near one
_WINDOW = 12
_GAP, _GAP_OF_SMALL = 0.01, 0.005
_SMALL_STAGES = 64
_CLEARLY_BETTER = 0.999
_ROUNDS = 3
_LEADS = (3.0, 1.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    decisions: Decisions
    plan: Plan
    timeline: Timeline
    cost: float


def optimise(problem: Problem, *, time_limit_seconds: float, write_weight: float) -> Plan:
    """The plan of the integer program, made exact; a greedy one is in reserve, so there always is one."""
    if problem.everything_fits:
        return finish(problem, build_plan(problem, {}, policy="ilp"))
    began = time.perf_counter()
    starts: list[Decisions] = [{}]
    report = SolverReport(name="none", status="failed")
    try:
        solution = _solve_coarse(problem, time_limit_seconds, write_weight)
    except SolverError:
        pass  # the report says so; the greedy plan stands in
    else:
        report = solution.report
        starts.insert(0, _decisions(problem, solution))
    best: _Candidate | None = None
    too_full: InfeasiblePlanError | None = None
    for start in starts:
        try:
            filled = evict_furthest(problem, start, early=True)
        except InfeasiblePlanError as error:
            too_full = error
            continue
        for decisions in (filled, prune(problem, filled, _costs(problem, filled))):
            candidate = _best_schedule(problem, decisions, write_weight)
            if best is None or candidate.cost < best.cost:
                best = candidate
        if time.perf_counter() - began > time_limit_seconds:
            break
    if best is None:
        assert too_full is not None  # without a candidate, every start has failed
        raise too_full
    return finish(problem, best.plan.model_copy(update={"solver": report}), best.timeline)


def _solve_coarse(problem: Problem, time_limit_seconds: float, write_weight: float) -> Solution:
    began = time.perf_counter()
    segments = segments_of(problem, _SEGMENTS)
    largest = max(problem.budgets.device_bytes // 100, 1)
    classes = classes_of(problem, segments, largest_bytes=largest)
    unit = problem.trace.ideal_seconds / _UNITS_PER_ITERATION or 1.0
    model = build_model(
        in_units(problem, unit),
        tuple(replace(segment, seconds=segment.seconds / unit) for segment in segments),
        classes,
        write_weight=write_weight,
        window=_WINDOW,
    )
    built = time.perf_counter() - began
    gap = _GAP_OF_SMALL if problem.stage_count <= _SMALL_STAGES else _GAP
    return solve(
        model, time_limit_seconds=time_limit_seconds, gap=gap, build_seconds=built, unit_seconds=unit
    )


def _decisions(problem: Problem, solution: Solution) -> Decisions:
    return {
        index: Decision(tier=tier, leave=problem.periods[index].after, start=problem.periods[index].before)
        for index, tier in solution.tiers.items()
    }


def _costs(problem: Problem, decisions: Decisions) -> dict[int, float]:
    return {
        index: problem.route(decision.tier).inward.seconds(problem.periods[index].size_bytes)
        for index, decision in decisions.items()
    }


def _best_schedule(problem: Problem, decisions: Decisions, write_weight: float) -> _Candidate:
    """Schedule by the ideal clock, replay, schedule again by the replayed clock, and so on; keep the best.

    Longer leads come first, and shorter ones must be clearly better: a lead absorbs what was not measured.
    """
    best: _Candidate | None = None
    for lead in _LEADS:
        clock = StageClock.ideal(problem)
        for _ in range(_ROUNDS):
            candidate = _replayed(problem, schedule(problem, decisions, clock, lead=lead), write_weight)
            if best is None or candidate.cost < best.cost * _CLEARLY_BETTER:
                best = candidate
            if candidate.timeline.stall_seconds <= 1e-6 * candidate.timeline.iteration_seconds:
                break
            timeline = candidate.timeline
            clock = StageClock(
                reached_seconds=tuple(stage.reached_seconds for stage in timeline.stages),
                iteration_seconds=timeline.iteration_seconds,
            )
    assert best is not None  # there is at least one lead and one round
    return best


def _replayed(problem: Problem, decisions: Decisions, write_weight: float) -> _Candidate:
    plan = build_plan(problem, decisions, policy="ilp")
    timeline = simulate(problem.trace, plan)
    cost = timeline.iteration_seconds
    for route in problem.routes:
        cost += (
            write_weight * timeline.moved_bytes.get(route.outward.name, 0) / route.outward.bytes_per_second
        )
    return _Candidate(decisions=decisions, plan=plan, timeline=timeline, cost=cost)


def finish(problem: Problem, plan: Plan, timeline: Timeline | None = None) -> Plan:
    """Add the simulator's predictions, and per offload the stage by whose end the copy is out."""
    if timeline is None:
        timeline = simulate(problem.trace, plan)
    plan = plan.model_copy(update={"moves": _with_free_after(problem, plan, timeline)})
    return plan.model_copy(
        update={
            "predicted": Predicted(
                iteration_seconds=timeline.iteration_seconds,
                ideal_seconds=problem.trace.ideal_seconds,
                lower_bound_seconds=lower_bound_seconds(problem),
                stall_seconds=timeline.stall_seconds,
                peak_bytes=timeline.peak_bytes,
                moved_bytes=timeline.moved_bytes,
                storage_written_bytes=timeline.storage_written_bytes,
            )
        }
    )


def _with_free_after(problem: Problem, plan: Plan, timeline: Timeline) -> tuple[object, ...]:
    clock = StageClock(
        reached_seconds=tuple(stage.start_seconds for stage in timeline.stages),
        iteration_seconds=timeline.iteration_seconds,
    )
    moves = list(plan.moves)
    for transfer in timeline.transfers:
        move = moves[transfer.move]
        if move.offload is None or not transfer.link.startswith("device->"):
            continue
        # Counted on from the issue, since the transfer may have been issued in the iteration before.
        issued = timeline.stages[move.offload.start % problem.stage_count].end_seconds
        done = issued + transfer.end_seconds - transfer.queued_seconds
        turns = move.offload.start // problem.stage_count
        stage = clock.stage_at(done - 1e-12) + turns * problem.stage_count
        free_after = min(max(stage, move.offload.start), move.before - 1)
        moves[transfer.move] = move.model_copy(
            update={"offload": move.offload.model_copy(update={"free_after": free_after})}
        )
    return tuple(moves)
