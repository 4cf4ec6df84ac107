"""Which recompute groups should run again: the coarse program decides that together with what waits in which tier."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

import pulp

from planner.errors import SolverError
from planner.ilp.block_classes import classes_of
from planner.ilp.formulation import build_model
from planner.ilp.model import RerunClass
from planner.lp import SegmentGrid, host_update_candidates, host_update_windows, pick_solver, run_solver, segments_of
from planner.problem import Problem, RerunPlaces, SolverSettings, in_units
from planner.schema import RecomputeGroup

__all__ = ["RerunProgram"]

_SEGMENTS = 64
_WINDOW = 3
_CLASSES_AT_PEAK = 100
_UNITS_PER_ITERATION = 100.0
_ROUNDING = 1e-3  # solvers return shares with errors of about this size


class RerunProgram:
    """The relaxed coarse program of a problem, in which groups may run again. Building it takes no solver.

    `likes`: classes of groups (ids) that are alike and in the same segments.
    """

    def __init__(self, problem: Problem, places: RerunPlaces, settings: SolverSettings) -> None:
        segments = segments_of(problem, _SEGMENTS)
        grid = SegmentGrid(segments)
        self._unit = problem.trace.ideal_seconds / _UNITS_PER_ITERATION or 1.0
        scaled = in_units(problem, self._unit)
        reruns = _classes(problem, places, grid, self._unit)
        groups = problem.source.recompute
        made_by = {block: number for number, each in enumerate(reruns) for group in each.groups for block in groups[group].blocks}
        largest = max(problem.budgets.device_bytes // 50, max(problem.live_bytes) // _CLASSES_AT_PEAK, 1)
        updates = host_update_candidates(problem)
        self._model = build_model(
            scaled,
            tuple(replace(segment, seconds=segment.seconds / self._unit) for segment in segments),
            classes_of(problem, grid, updates, largest_bytes=largest, rerun_of=made_by),
            write_weight=settings.write_weight,
            window=_WINDOW,
            updates=[host_update_windows(scaled, grid, each, unit_seconds=self._unit, window=_WINDOW) for each in updates],
            reruns=reruns,
        )
        self._settings = settings
        self.likes = [each.groups for each in reruns]

    def shares(self) -> dict[int, float]:
        """Return how much of each group (id) runs again at the optimum; groups without any are left out.

        All groups of a class have the same share. Later calls of `seconds` keep the updates on the host that were chosen here.
        Raises SolverError where no solver is installed or it fails.
        """
        self._solve()
        for update in self._model.updates:
            chosen = min(max(update.chosen.value() or 0.0, 0.0), 1.0)
            update.chosen.lowBound = update.chosen.upBound = chosen
        shares = {
            group: share.value() or 0.0 for groups, share in zip(self.likes, self._model.again, strict=True) for group in groups
        }
        return {group: share for group, share in shares.items() if share > _ROUNDING}

    def seconds(self, groups: Collection[int]) -> float:
        """Return the objective, about the iteration time, if exactly `groups` (ids) run again. Raises SolverError."""
        for members, share in zip(self.likes, self._model.again, strict=True):
            share.lowBound = share.upBound = sum(member in groups for member in members) / len(members)
        self._solve()
        return float(pulp.value(self._model.program.objective)) * self._unit

    def _solve(self) -> None:
        solver = pick_solver(self._settings, linear=True, vertex=False)
        run_solver(self._model.program, solver, task="the program for re-runs", remedy="nothing runs again")
        if self._model.program.sol_status != pulp.LpSolutionOptimal:
            raise SolverError(f"{solver.name} did not solve the program for re-runs in {self._settings.time_limit_seconds} s")


def _classes(problem: Problem, places: RerunPlaces, grid: SegmentGrid, unit_seconds: float) -> list[RerunClass]:
    """Put groups together whose stages and places are in the same segments, and that take about as long for their bytes."""
    found: dict[tuple[int, int, str], list[RecomputeGroup]] = {}
    for number, place in places.alone.items():
        group = problem.source.recompute[number]
        begin, end = grid.span_of(group.stage), grid.span_of(place)
        size = sum(problem.source.blocks[block].size_bytes for block in group.blocks)
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
