"""From the coarse solution to an exact plan: schedule, replay, improve, keep the best."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from planner.bound import lower_bound_seconds
from planner.classes import classes_of
from planner.errors import InfeasiblePlanError, SolverError
from planner.evict import evict_furthest, prune
from planner.formulation import build_model
from planner.plan import Plan, Predicted, SolverReport
from planner.problem import Decision, Decisions, Problem, build_plan, in_units
from planner.room import LowerTiers
from planner.schedule import StageClock, schedule
from planner.segments import segments_of
from planner.simulate import simulate
from planner.solve import DEFAULT_WRITE_WEIGHT, Solution, SolverSettings, solve
from planner.timeline import Timeline
from planner.update_windows import candidates, segment_windows
from planner.updates import movable_blocks, parameters

__all__ = ["finish", "optimise"]

_SEGMENTS = 64
_CLASSES_AT_PEAK = 300  # more blocks than this at once are put together, so that large programs stay solvable
_UNITS_PER_ITERATION = 100.0  # solvers have absolute tolerances: keep numbers near one
_WINDOW = 8
_MOST_INTEGER_STAGES = 64
"""Longer iterations get the linear relaxation, rounded and made exact: it comes as close to the bound, in a fraction
of the time, where the integer program often finds nothing within the limit."""
_CLEARLY_BETTER = 0.999
_ROUNDS = 3
_LEADS = (3.0, 1.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    decisions: Decisions
    plan: Plan
    timeline: Timeline
    cost: float


def optimise(
    problem: Problem,
    *,
    rivals: Sequence[Callable[[Problem], Decisions]],
    settings: SolverSettings,
) -> Plan:
    """The plan of the integer program, made exact, or that of a rival policy where it is better.

    So there always is a plan where one exists. Up to the default weight of writes no plan is chosen that is
    slower than a rival's. Raises InfeasiblePlanError where the lower tiers are too small.
    """
    if problem.everything_fits:
        return finish(problem, build_plan(problem, {}, policy="ilp"))
    solutions = _coarse_solutions(problem, settings)
    report = solutions[0].report if solutions else SolverReport(name="none", status="failed")
    # Without a solution the report says so, and a greedy plan stands in.
    starts = [_decisions(problem, solution) for solution in solutions] or [(problem, {})]
    own: list[_Candidate] = []
    too_full: InfeasiblePlanError | None = None
    for start in starts:
        try:
            own += _exact_candidates(*start, settings.write_weight)
        except InfeasiblePlanError as error:
            too_full = error
    others = _rival_candidates(problem, rivals, settings.write_weight)
    if not own and not others:
        assert too_full is not None  # why there is no candidate
        raise too_full
    best = _choose(own, others, settings.write_weight)
    return finish(problem, best.plan.model_copy(update={"solver": report}), best.timeline)


def _exact_candidates(problem: Problem, start: Decisions, write_weight: float) -> list[_Candidate]:
    """The decisions made feasible, with all the moves that they ask for and with those only that the budget needs.

    Raises InfeasiblePlanError where the lower tiers are too small.
    """
    filled = evict_furthest(problem, start, early=True, spread=True)
    pruned = prune(problem, filled, _costs(problem, filled))
    different = [filled] if pruned == filled else [filled, pruned]
    return [_best_schedule(problem, decisions, write_weight) for decisions in different]


def _rival_candidates(
    problem: Problem, rivals: Sequence[Callable[[Problem], Decisions]], write_weight: float
) -> list[_Candidate]:
    """What the other policies plan, as they plan it."""
    found = []
    for rival in rivals:
        try:
            found.append(_replayed(problem, rival(problem), write_weight))
        except InfeasiblePlanError:
            continue  # this one finds no way; others may
    return found


def _choose(candidates: list[_Candidate], others: list[_Candidate], write_weight: float) -> _Candidate:
    """The cheapest; up to the default weight, of those that are no slower than any rival."""
    pool = [*candidates, *others]
    if others and write_weight <= DEFAULT_WRITE_WEIGHT:
        limit = min(other.timeline.iteration_seconds for other in others)
        pool = [candidate for candidate in pool if candidate.timeline.iteration_seconds <= limit]
    return min(pool, key=lambda candidate: candidate.cost)


def _coarse_solutions(problem: Problem, settings: SolverSettings) -> list[Solution]:
    """Of the integer program, unless it is too large; and of the relaxed one, unless that has been solved to the end."""
    found: list[Solution] = []
    for relaxed in (False, True) if problem.stage_count <= _MOST_INTEGER_STAGES else (True,):
        with contextlib.suppress(SolverError):
            found.append(_solve_coarse(problem, settings, relaxed=relaxed))
            if found[-1].report.status == "optimal":
                break
    return found


def _solve_coarse(problem: Problem, settings: SolverSettings, *, relaxed: bool) -> Solution:
    began = time.perf_counter()
    segments = segments_of(problem, _SEGMENTS)
    subgroups = candidates(problem)
    largest = max(problem.budgets.device_bytes // 100, max(problem.live_bytes) // _CLASSES_AT_PEAK, 1)
    classes = classes_of(problem, segments, subgroups, largest_bytes=largest)
    unit = problem.trace.ideal_seconds / _UNITS_PER_ITERATION or 1.0
    scaled = in_units(problem, unit)
    updates = [segment_windows(scaled, segments, g, unit_seconds=unit, window=_WINDOW) for g in subgroups]
    model = build_model(
        scaled,
        tuple(replace(segment, seconds=segment.seconds / unit) for segment in segments),
        classes,
        write_weight=settings.write_weight,
        window=_WINDOW,
        updates=updates,
    )
    built = time.perf_counter() - began
    return solve(
        model,
        relaxed=relaxed,
        settings=settings,
        build_seconds=built,
        unit_seconds=unit,
    )


def _decisions(problem: Problem, solution: Solution) -> tuple[Problem, Decisions]:
    """What the solution chooses, with the problem that is left when some subgroups update on the host.

    Rounding may overfill a tier: then the fastest other one with room, or none; updates on the host come first.
    """
    chosen = {(problem.periods[i].block, problem.periods[i].after): tier for i, tier in solution.tiers.items()}
    left = Problem.of(problem.source, problem.budgets, _by_need(problem, solution.on_host))
    room = LowerTiers(left, {})
    decisions: Decisions = {}
    for index, period in enumerate(left.periods):
        tier = "host" if index in left.updated else chosen.get((period.block, period.after))
        if tier is not None and not room.fits(index, tier):
            tier = room.best(index)
        if tier is not None:
            room.take(index, tier)
            decisions[index] = Decision(tier=tier, leave=period.after, start=period.before)
    return left, decisions


def _by_need(problem: Problem, on_host: Collection[int]) -> list[int]:
    """Subgroups by the stage that first needs their parameters again; as many as fit into the host tier."""
    limit = next((route.budget_bytes for route in problem.routes if route.tier == "host"), None)
    trace = problem.source

    def needed(number: int) -> tuple[int, int]:
        subgroup = trace.subgroups[number]
        uses = (use for block in parameters(trace, subgroup) for use in block.uses if use != subgroup.stage)
        after = ((use - subgroup.stage) % len(trace.stages) for use in uses)
        return min(after, default=len(trace.stages)) + subgroup.stage, number

    fitting, filled = [], 0
    for number in sorted(on_host, key=needed):
        size = sum(block.size_bytes for block in movable_blocks(trace, trace.subgroups[number]))
        if limit is None or filled + size <= limit:
            fitting.append(number)
            filled += size
    return fitting


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
    known: set[tuple[tuple[int, int], ...]] = set()
    for lead in _LEADS:
        clock = StageClock.ideal(problem)
        for _ in range(_ROUNDS):
            scheduled = schedule(problem, decisions, clock, lead=lead)
            starts = tuple((index, decision.start) for index, decision in scheduled.items())
            if starts in known:
                break  # the same clock would follow
            known.add(starts)
            candidate = _replayed(problem, scheduled, write_weight)
            if best is None or candidate.cost < best.cost * _CLEARLY_BETTER:
                best = candidate
            if candidate.timeline.stall_seconds <= 1e-6 * candidate.timeline.iteration_seconds:
                break
            clock = StageClock.replayed(problem, candidate.plan, candidate.timeline)
    assert best is not None  # there is at least one lead and one round
    return best


def _replayed(problem: Problem, decisions: Decisions, write_weight: float) -> _Candidate:
    plan = build_plan(problem, decisions, policy="ilp")
    timeline = simulate(problem.source, plan)
    cost = timeline.iteration_seconds
    for route in problem.routes:
        cost += (
            write_weight * timeline.moved_bytes.get(route.outward.name, 0) / route.outward.bytes_per_second
        )
    return _Candidate(decisions=decisions, plan=plan, timeline=timeline, cost=cost)


def finish(problem: Problem, plan: Plan, timeline: Timeline | None = None) -> Plan:
    """Add the simulator's predictions, and per offload the stage by whose end the copy is out."""
    if timeline is None:
        timeline = simulate(problem.source, plan)
    plan = plan.model_copy(update={"moves": _with_free_after(problem, plan, timeline)})
    return plan.model_copy(
        update={
            "predicted": Predicted(
                iteration_seconds=timeline.iteration_seconds,
                ideal_seconds=problem.source.ideal_seconds,
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
