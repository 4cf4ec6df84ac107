"""Put a coarse program together: coarse time, classes of blocks, updates on the host, and what may run again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.ilp.block_classes import classes_of
from planner.ilp.formulation import build_model
from planner.ilp.model import CoarseModel
from planner.ilp.reruns import rerun_classes
from planner.lp import SegmentGrid, host_update_windows, segments_of
from planner.problem import Problem, RerunPlaces, in_units, solver_unit
from planner.schema import Subgroup

__all__ = ["CoarseProgram", "Resolution", "coarse_program"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """How fine a program is: the most segments, the number of them that a copy may choose from, and about how many classes of
    blocks may exist at once. If there are more blocks than that, some are put together: large programs stay solvable.
    """

    max_segments: int
    window: int
    classes_at_peak: int = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class CoarseProgram:
    """A program with what its solution is read by. It counts time in `unit_seconds`. `build_seconds`: what building it took."""

    model: CoarseModel
    unit_seconds: float
    build_seconds: float


def coarse_program(
    problem: Problem,
    resolution: Resolution,
    subgroups: Sequence[Subgroup],
    *,
    write_weight: float,
    decided: bool = False,
    places: RerunPlaces | None = None,
) -> CoarseProgram:
    """Build a program. subgroups: those that may update on the host, or (decided) that do. places: groups that may run again."""
    began = time.perf_counter()
    segments = segments_of(problem, resolution.max_segments)
    grid = SegmentGrid(segments)
    unit = solver_unit(problem)
    scaled = in_units(problem, unit)
    reruns = [] if places is None else rerun_classes(problem, places, grid, unit)
    groups = problem.source.recompute
    made_by = {block: number for number, each in enumerate(reruns) for group in each.groups for block in groups[group].blocks}
    at_peak = resolution.classes_at_peak
    largest = max(problem.budgets.device_bytes * 3 // at_peak, max(problem.live_bytes) // at_peak, 1)
    window = resolution.window
    model = build_model(
        scaled,
        tuple(replace(segment, seconds=segment.seconds / unit) for segment in segments),
        classes_of(problem, grid, subgroups, largest_bytes=largest, rerun_of=made_by),
        write_weight=write_weight,
        window=window,
        updates=[host_update_windows(scaled, grid, each, unit_seconds=unit, window=window) for each in subgroups],
        updates_decided=decided,
        reruns=reruns,
    )
    return CoarseProgram(model=model, unit_seconds=unit, build_seconds=time.perf_counter() - began)
