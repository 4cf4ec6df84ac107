"""Which recompute groups should run again: the coarse program decides that together with what waits in which tier."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pulp

from planner.errors import SolverError
from planner.ilp.block_classes import classes_of
from planner.ilp.formulation import build_model
from planner.ilp.model import RerunClass
from planner.lp import SegmentGrid, host_update_candidates, host_update_windows, pick_solver, run_solver, segments_of
from planner.problem import Problem, RerunPlaces, SolverSettings, in_units, made_bytes, solver_unit
from planner.schema import RecomputeGroup

__all__ = ["rerun_shares"]

_SEGMENTS = 64
_WINDOW = 3
_CLASSES_AT_PEAK = 100
_ROUNDING = 1e-3  # solvers return shares with errors of about this size


def rerun_shares(problem: Problem, places: RerunPlaces, settings: SolverSettings) -> dict[int, float]:
    """Solve the relaxed coarse program in which groups may run again. Return how much of each group (id) runs again.

    Groups of which nothing does are left out. Groups that are alike and in the same segments have the same share. Raises
    SolverError where no solver is installed or it fails.
    """
    segments = segments_of(problem, _SEGMENTS)
    grid = SegmentGrid(segments)
    unit = solver_unit(problem)
    scaled = in_units(problem, unit)
    reruns = _classes(problem, places, grid, unit)
    groups = problem.source.recompute
    made_by = {block: number for number, each in enumerate(reruns) for group in each.groups for block in groups[group].blocks}
    largest = max(problem.budgets.device_bytes // 50, max(problem.live_bytes) // _CLASSES_AT_PEAK, 1)
    updates = host_update_candidates(problem)
    model = build_model(
        scaled,
        tuple(replace(segment, seconds=segment.seconds / unit) for segment in segments),
        classes_of(problem, grid, updates, largest_bytes=largest, rerun_of=made_by),
        write_weight=settings.write_weight,
        window=_WINDOW,
        updates=[host_update_windows(scaled, grid, each, unit_seconds=unit, window=_WINDOW) for each in updates],
        reruns=reruns,
    )
    solver = pick_solver(settings, linear=True, vertex=False)
    run_solver(model.program, solver, task="the program for re-runs", remedy="nothing runs again")
    if model.program.sol_status != pulp.LpSolutionOptimal:
        raise SolverError(f"{solver.name} did not solve the program for re-runs in {settings.time_limit_seconds} s")
    shares = {group: share.value() or 0.0 for each, share in zip(reruns, model.again, strict=True) for group in each.groups}
    return {group: share for group, share in shares.items() if share > _ROUNDING}


def _classes(problem: Problem, places: RerunPlaces, grid: SegmentGrid, unit_seconds: float) -> list[RerunClass]:
    """Put groups together whose stages and places are in the same segments, and that take about as long for their bytes."""
    found: dict[tuple[int, int, str], list[RecomputeGroup]] = {}
    for number, place in places.alone.items():
        group = problem.source.recompute[number]
        begin, end = grid.span_of(group.stage), grid.span_of(place)
        size = made_bytes(problem.source, group)
        if end - begin >= 2 and size:
            found.setdefault((begin, end, f"{group.duration_seconds / size:.0e}"), []).append(group)
    return [
        RerunClass(
            groups=tuple(group.id for group in groups),
            end=end,
            seconds=sum(group.duration_seconds for group in groups) / unit_seconds,
            room_bytes=max(group.workspace_bytes for group in groups),
            held_bytes=_held(problem, groups, grid, end),
        )
        for (_, end, _), groups in found.items()
    ]


def _held(problem: Problem, groups: Iterable[RecomputeGroup], grid: SegmentGrid, end: int) -> dict[int, int]:
    """By segment, the bytes that live on between their last use and the segment `end` of the re-run."""
    held: dict[int, int] = {}
    for number in {block for group in groups for block in group.reads}:
        block = problem.trace.blocks[number]
        if block.persistent:
            continue
        for k in range(grid.span_of(block.last_stage) + 1, end):
            held[k] = held.get(k, 0) + block.size_bytes
    return held
