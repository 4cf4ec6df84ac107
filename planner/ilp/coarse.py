"""Solve the program over coarse time: as an integer program where it is small, otherwise relaxed first.

And ask it which recompute groups should run again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from planner.errors import SolverError
from planner.ilp.formulation import Resolution, coarse_program
from planner.ilp.solve import ROUNDING, CoarseSolution, complete, solve
from planner.lp import solve_program
from planner.problem import Problem, RerunPlaces, SolverSettings, host_bytes, needed_again
from planner.schema import Subgroup

__all__ = ["MAX_INTEGER_STAGES", "coarse_solutions", "in_order_of_need", "rerun_shares"]

MAX_INTEGER_STAGES = 64
"""Longer iterations begin with the linear relaxation: a whole integer program often finds nothing within the limit."""

_FINE = Resolution(max_segments=140, window=6)
"""For one lower tier. With 64 segments, plans of long iterations are up to 3 % slower; with 250, they are no faster, and take
twice as long."""
_SEVERAL_TIERS = Resolution(max_segments=64, window=6)
"""Here more segments gain little, and take much longer."""
_ROUGH = Resolution(max_segments=24, window=3)
_RERUNS = Resolution(max_segments=140, window=4, classes_at_peak=200)
_RERUNS_ROUGH = Resolution(max_segments=64, window=3, classes_at_peak=100)


def coarse_solutions(
    problem: Problem, settings: SolverSettings, on_host: Collection[int] | None = None, *, integer: bool = True
) -> Iterator[CoarseSolution]:
    """Yield solutions to make exact, the first ones first. Each is worked out when it is asked for.

    Short iterations: the integer program's, and the relaxed one's, rounded, unless the first is proved optimal. Long iterations:
    the relaxed one's, rounded; then what was not whole as an integer program. And both without updates on the host, where that
    looks better. Without `integer`, only relaxed ones.

    on_host: the subgroups that update on the host, if that is already decided. If not, the relaxed program decides it at a low
    resolution first, and then it is fixed. If it were rounded at the end instead, the moves of a subgroup that is half here and
    half there would fit neither. Yields nothing where all runs of the solver fail.
    """
    decided = on_host is not None
    subgroups = [subgroup for subgroup in problem.may_update_on_host if on_host is None or subgroup.id in on_host]
    short = problem.stage_count <= MAX_INTEGER_STAGES
    with contextlib.suppress(SolverError):
        if short and integer:
            built = coarse_program(problem, _resolution(problem), subgroups, write_weight=settings.write_weight, decided=decided)
            whole = solve(built, relaxed=False, vertex=True, settings=settings)
            yield whole
            if whole.report.status == "optimal":
                return
    with contextlib.suppress(SolverError):
        rough: CoarseSolution | None = None
        if not decided and subgroups:
            rough = _rough(problem, settings, subgroups, decided=False)
            chosen = in_order_of_need(problem, rough.on_host)
            subgroups = [subgroup for subgroup in subgroups if subgroup.id in chosen]
        yield from _refined(problem, settings, subgroups, rough, integer=integer)
        if not short and rough is not None and subgroups:
            # Shares of updates may fit where whole ones do not: near the floor, none at all may be better.
            some, none = (_rough(problem, settings, each, decided=True) for each in (subgroups, ()))
            if _relaxed_seconds(none) < _relaxed_seconds(some):
                yield from _refined(problem, settings, (), none, integer=integer)


def _refined(
    problem: Problem, settings: SolverSettings, subgroups: Sequence[Subgroup], rough: CoarseSolution | None, *, integer: bool
) -> Iterator[CoarseSolution]:
    """Solutions in which exactly `subgroups` update on the host. rough: what decided that; the first report counts its time."""
    resolution = _resolution(problem)
    built = coarse_program(problem, resolution, subgroups, write_weight=settings.write_weight, decided=True)
    relaxed = solve(built, relaxed=True, vertex=True, settings=settings)
    yield relaxed if rough is None else _with_time_of(rough, relaxed)
    if integer and problem.stage_count > MAX_INTEGER_STAGES:
        yield complete(built, relaxed, settings)


def _resolution(problem: Problem) -> Resolution:
    return _FINE if len(problem.routes) == 1 else _SEVERAL_TIERS


def _rough(problem: Problem, settings: SolverSettings, subgroups: Sequence[Subgroup], *, decided: bool) -> CoarseSolution:
    """Solve the relaxed program at a low resolution. subgroups: those that may update on the host, or (decided) that do."""
    built = coarse_program(problem, _ROUGH, subgroups, write_weight=settings.write_weight, decided=decided)
    return solve(built, relaxed=True, vertex=False, settings=settings)


def rerun_shares(problem: Problem, places: RerunPlaces, settings: SolverSettings) -> dict[int, float]:
    """Solve the relaxed coarse program in which groups may run again. Return how much of each group (id) runs again.

    Groups of which nothing does are left out; a rough program tells first whether there are others, and with several lower
    tiers that is all. Groups that are alike and in the same segments have the same share. Raises SolverError where the solver
    fails.
    """
    shares: dict[int, float] = {}
    for resolution in (_RERUNS_ROUGH, _RERUNS):
        updates = problem.may_update_on_host
        built = coarse_program(problem, resolution, updates, write_weight=settings.write_weight, places=places)
        model = built.model
        solved = solve_program(model.program, settings, linear=True, vertex=False)
        if not solved.optimal:
            raise SolverError(f"HiGHS did not solve the program for re-runs in {settings.time_limit_seconds} s")
        shares = {group: solved.values[r] for each, r in zip(model.reruns, model.again, strict=True) for group in each.groups}
        shares = {group: share for group, share in shares.items() if share > ROUNDING}
        if not shares or len(problem.routes) > 1 or problem.stage_count <= _RERUNS_ROUGH.max_segments:
            break
    return shares


def in_order_of_need(problem: Problem, on_host: Collection[int]) -> list[int]:
    """Sort subgroups by the stage that first needs their parameters again; return as many as fit into the host tier."""
    limit = next((route.budget_bytes for route in problem.routes if route.tier == "host"), None)
    trace = problem.source

    def need(number: int) -> tuple[int, int]:
        return needed_again(trace, trace.subgroups[number]), number

    fitting, filled = [], 0
    for number in sorted(on_host, key=need):
        size = host_bytes(trace, trace.subgroups[number])
        if limit is None or filled + size <= limit:
            fitting.append(number)
            filled += size
    return fitting


def _relaxed_seconds(solution: CoarseSolution) -> float:
    """The objective of a relaxed solution."""
    assert solution.report.bound_seconds is not None  # relaxed programs are solved to the optimum
    return solution.report.bound_seconds


def _with_time_of(first: CoarseSolution, second: CoarseSolution) -> CoarseSolution:
    """The second solution, whose report counts the time of both."""
    report = second.report.model_copy(
        update={
            "bound_seconds": None,  # the second bound holds for these updates only
            "build_seconds": first.report.build_seconds + second.report.build_seconds,
            "solve_seconds": first.report.solve_seconds + second.report.solve_seconds,
        }
    )
    return replace(second, report=report)
