"""Recompute groups that the coarse program cannot tell apart, put together."""

from __future__ import annotations

from collections.abc import Iterable

from planner.ilp.model import RerunClass
from planner.lp import SegmentGrid
from planner.problem import Problem, RerunPlaces, made_bytes
from planner.schema import RecomputeGroup

__all__ = ["rerun_classes"]


def rerun_classes(problem: Problem, places: RerunPlaces, grid: SegmentGrid, unit_seconds: float) -> list[RerunClass]:
    """Put groups together whose stages and places are in the same segments, and that take about as long for their bytes.

    Equal layers are one class, as far as they are in the same segments. Groups whose blocks are away for no segment are left out.
    """
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
            reads=frozenset(block for group in groups for block in group.reads),
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
