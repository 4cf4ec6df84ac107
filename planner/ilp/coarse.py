"""Solve the program over coarse time: as an integer program where it is small, otherwise relaxed, in two steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.errors import SolverError
from planner.ilp.block_classes import classes_of
from planner.ilp.formulation import build_model
from planner.ilp.solve import CoarseSolution, solve
from planner.lp import SegmentGrid, host_update_candidates, host_update_windows, segments_of
from planner.problem import Problem, SolverSettings, in_units, movable_blocks, parameters, solver_unit, total_bytes
from planner.schema import Subgroup

__all__ = ["MAX_INTEGER_STAGES", "coarse_solutions", "in_order_of_need"]

_CLASSES_AT_PEAK = 300  # if more blocks than this exist at once, some are put together: large programs stay solvable
MAX_INTEGER_STAGES = 64
"""Longer iterations get only the linear relaxation, rounded and made exact. It comes as close to the bound in a fraction of the
time; the integer program often finds nothing within the limit.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resolution:
    """How fine the program is: the most segments, and the number of them that a copy may choose from."""

    max_segments: int
    window: int


_FINE = _Resolution(max_segments=64, window=6)
_ROUGH = _Resolution(max_segments=24, window=3)


def coarse_solutions(
    problem: Problem, settings: SolverSettings, on_host: Collection[int] | None = None, *, integer: bool = True
) -> Iterator[CoarseSolution]:
    """Yield the integer program's solution, unless it is too large or not wanted (`integer`); and the relaxed one's, unless the
    first is proved optimal.

    For long iterations another one follows, without updates on the host, where that looks better. Each is worked out when it is
    asked for.

    on_host: the subgroups that update on the host, if that is already decided. If not, the relaxed program decides it at a low
    resolution first, and then it is fixed. If it were rounded at the end instead, the moves of a subgroup that is half here and
    half there would fit neither. Yields nothing where no solver is installed or all runs fail.
    """
    decided = on_host is not None
    subgroups = [subgroup for subgroup in host_update_candidates(problem) if on_host is None or subgroup.id in on_host]
    short = problem.stage_count <= MAX_INTEGER_STAGES
    with contextlib.suppress(SolverError):
        if short and integer:
            whole = _solve(problem, settings, subgroups, _FINE, relaxed=False, decided=decided)
            yield whole
            if whole.report.status == "optimal":
                return
    with contextlib.suppress(SolverError):
        if not decided and subgroups:
            rough = _solve(problem, settings, subgroups, _ROUGH, relaxed=True)
            chosen = in_order_of_need(problem, rough.on_host)
            subgroups = [subgroup for subgroup in subgroups if subgroup.id in chosen]
            yield _with_time_of(rough, _solve(problem, settings, subgroups, _FINE, relaxed=True, decided=True))
        else:
            yield _solve(problem, settings, subgroups, _FINE, relaxed=True, decided=True)
        if not short and not decided and subgroups:
            # Shares of updates may fit where whole ones do not: near the floor, none at all may be better.
            some, none = (_solve(problem, settings, each, _ROUGH, relaxed=True, decided=True) for each in (subgroups, ()))
            if _relaxed_seconds(none) < _relaxed_seconds(some):
                yield _with_time_of(none, _solve(problem, settings, (), _FINE, relaxed=True, decided=True))


def in_order_of_need(problem: Problem, on_host: Collection[int]) -> list[int]:
    """Sort subgroups by the stage that first needs their parameters again; return as many as fit into the host tier."""
    limit = next((route.budget_bytes for route in problem.routes if route.tier == "host"), None)
    trace = problem.source

    def needed(number: int) -> tuple[int, int]:
        subgroup = trace.subgroups[number]
        uses = (use for block in parameters(trace, subgroup) for use in block.uses if use != subgroup.stage)
        return min((use - subgroup.stage) % len(trace.stages) for use in uses) + subgroup.stage, number

    fitting, filled = [], 0
    for number in sorted(on_host, key=needed):
        size = total_bytes(movable_blocks(trace, trace.subgroups[number]))
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


def _solve(
    problem: Problem,
    settings: SolverSettings,
    subgroups: Sequence[Subgroup],
    resolution: _Resolution,
    *,
    relaxed: bool,
    decided: bool = False,
) -> CoarseSolution:
    """Build and solve one program. subgroups: those that may update on the host, or (decided) that do."""
    began = time.perf_counter()
    segments = segments_of(problem, resolution.max_segments)
    grid = SegmentGrid(segments)
    largest = max(problem.budgets.device_bytes // 100, max(problem.live_bytes) // _CLASSES_AT_PEAK, 1)
    classes = classes_of(problem, grid, subgroups, largest_bytes=largest)
    unit = solver_unit(problem)
    scaled = in_units(problem, unit)
    model = build_model(
        scaled,
        tuple(replace(segment, seconds=segment.seconds / unit) for segment in segments),
        classes,
        write_weight=settings.write_weight,
        window=resolution.window,
        updates=[
            host_update_windows(scaled, grid, subgroup, unit_seconds=unit, window=resolution.window) for subgroup in subgroups
        ],
        updates_decided=decided,
    )
    return solve(
        model,
        relaxed=relaxed,
        vertex=not relaxed or resolution is _FINE,
        settings=settings,
        build_seconds=time.perf_counter() - began,
        unit_seconds=unit,
    )
