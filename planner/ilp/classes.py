"""Coarse time: neighbouring stages as one segment, and the blocks and recompute groups that cannot be told apart then."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import NamedTuple

from planner.problem import Problem, RerunPlaces, made_bytes, stage_floors
from planner.schema import Link, RecomputeGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Stages `first` to `last`, both included.

    `seconds`: the sum of their durations. `peak`: the stage whose memory counts for the segment. `user`: all of them are user
    code.
    """

    first: int
    last: int
    peak: int
    seconds: float
    user: bool = False


class SegmentGrid:
    """Spans of time that are segments, see `SpanGrid`. Stages and segments are numbered on over the iteration's end."""

    at_instants = False

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segment_of = [number for number, s in enumerate(segments) for _ in range(s.first, s.last + 1)]
        self._peaks = [segment.peak for segment in segments]

    def span_of(self, stage: int) -> int:
        """Return the segment of a stage."""
        turns, rest = divmod(stage, len(self._segment_of))
        return self._segment_of[rest] + turns * len(self._peaks)

    update_begin = span_of

    def start_of(self, stage: int) -> int:
        """Return the first segment whose peak is at or after the stage: there a block that the stage uses is back."""
        turns, rest = divmod(stage, len(self._segment_of))
        return bisect_left(self._peaks, rest) + turns * len(self._peaks)

    def end_of(self, stage: int) -> int:
        """Return the last segment whose peak is at or before the stage: there a block that the stage uses is still needed."""
        turns, rest = divmod(stage, len(self._segment_of))
        return bisect_right(self._peaks, rest) - 1 + turns * len(self._peaks)


def segments_of(problem: Problem, max_segments: int) -> tuple[Segment, ...]:
    """Merge neighbouring stages, cheapest pair first, until at most `max_segments` are left.

    The cost of a merged segment is its share of the iteration's time, plus a quarter of the bytes first used in it as a share of
    the budget. Borders between phases stay unless they would take half of the segments; then at least those of optimizer steps.
    """
    stages = problem.trace.stages
    total = max(problem.trace.ideal_seconds, 1e-12)
    budget = max(problem.budgets.device_bytes, 1)
    weight = [stage.duration_seconds / total for stage in stages]
    for block in problem.trace.blocks:
        weight[block.uses[0]] += block.size_bytes / budget / 4
    firsts = list(range(len(stages)))
    weights = list(weight)
    phases = ["backward" if stage.phase == "recompute" else stage.phase for stage in stages]
    fixed = {i for i in range(1, len(stages)) if phases[i] != phases[i - 1]}
    if len(fixed) >= max_segments // 2:
        # Updates on the host begin with the step: else the program would let them begin in the backward pass.
        fixed = {i for i in fixed if "optimizer" in phases[i - 1 : i + 1]}
    if len(fixed) >= max_segments // 2:
        fixed = set()
    together = [inf] + [inf if i in fixed else weights[i - 1] + weights[i] for i in range(1, len(stages))]
    while len(firsts) > max_segments:
        best = together.index(min(together))
        weights[best - 1] += weights.pop(best)
        del firsts[best], together[best]
        for i in (best - 1, best):
            if i < len(firsts) and together[i] < inf:
                together[i] = weights[i - 1] + weights[i]
    borders = [*firsts, len(stages)]
    needed = stage_floors(problem.trace)
    return tuple(
        Segment(
            first=first,
            last=end - 1,
            peak=max(range(first, end), key=lambda stage: (problem.live_bytes[stage], needed[stage])),
            seconds=sum(stage.duration_seconds for stage in stages[first:end]),
            user=all(stage.phase == "user" for stage in stages[first:end]),
        )
        for first, end in pairwise(borders)
    )


class ClassPeriod(NamedTuple):
    """A period in which the members are idle at the peaks of the segments `begin` + 1 … `end` − 1.

    `end` is numbered on over the iteration's end. `indices`: the period of each member, by position in `Problem.periods`.
    `final`: the members do not come back.
    """

    begin: int
    end: int
    epoch: int
    rank: int
    final: bool
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockClass:
    """Blocks that are idle in the same segments; they are decided together. `size_bytes` is their sum.

    `segments`: those in which they exist if they are not persistent. `update`: the class of subgroups that all of them belong to,
    if these can update on the host. `user_visible`: user code can reach them. `rerun`: the class of re-runs that makes all of
    them anew, if the program decides about re-runs.
    """

    blocks: tuple[int, ...]
    size_bytes: int
    read_only: bool
    persistent: bool
    segments: range
    periods: tuple[ClassPeriod, ...]
    update: int | None = None
    user_visible: bool = False
    rerun: int | None = None

    def seconds(self, link: Link) -> float:
        """Return the time that all members together occupy a link."""
        return len(self.blocks) * link.latency_seconds + self.size_bytes / link.bytes_per_second


def classes_of(
    problem: Problem,
    grid: SegmentGrid,
    updates: Sequence[Collection[int]],
    *,
    largest_bytes: int,
    rerun_of: Mapping[int, int],
) -> tuple[BlockClass, ...]:
    """Group blocks by the segments of their periods. A class holds at most `largest_bytes`, or one block.

    updates: the subgroups of each class of updates on the host. rerun_of: by block, the class of re-runs that makes it anew.
    Blocks of different ones of these are in different classes.
    """
    owner = {
        block: number
        for number, subgroups in enumerate(updates)
        for subgroup in subgroups
        for block in problem.trace.subgroups[subgroup].blocks
    }
    by_block: dict[int, list[ClassPeriod]] = {}
    for index, period in enumerate(problem.periods):
        begin, end = grid.end_of(period.after), grid.start_of(period.before)
        if end - begin >= 2:
            idle = ClassPeriod(begin, end, period.epoch, period.rank, period.final, indices=(index,))
            by_block.setdefault(period.block, []).append(idle)
    groups: dict[tuple[object, ...], list[int]] = {}
    for block_id, periods in by_block.items():
        block = problem.trace.blocks[block_id]
        shape = tuple(period._replace(indices=()) for period in periods)
        key = (owner.get(block_id), rerun_of.get(block_id), block.kind, block.persistent, not block.writes, shape)
        groups.setdefault(key, []).append(block_id)
    classes = []
    for chunk in (chunk for members in groups.values() for chunk in _chunks(problem, members, largest_bytes)):
        blocks = [problem.trace.blocks[member] for member in chunk]
        alike = zip(*(by_block[member] for member in chunk), strict=True)
        classes.append(
            BlockClass(
                blocks=tuple(chunk),
                size_bytes=sum(block.size_bytes for block in blocks),
                read_only=blocks[0].persistent and not blocks[0].writes,
                persistent=blocks[0].persistent,
                user_visible=blocks[0].user_visible,
                segments=range(
                    min(grid.span_of(block.uses[0]) for block in blocks),
                    max(grid.span_of(block.last_stage) for block in blocks) + 1,
                ),
                periods=tuple(same[0]._replace(indices=tuple(each.indices[0] for each in same)) for same in alike),
                update=owner.get(chunk[0]),
                rerun=rerun_of.get(chunk[0]),
            )
        )
    return tuple(classes)


def _chunks(problem: Problem, members: list[int], largest_bytes: int) -> list[list[int]]:
    chunks: list[list[int]] = []
    filled = 0
    for member in members:
        size = problem.trace.blocks[member].size_bytes
        if not chunks or filled + size > largest_bytes:
            chunks.append([])
            filled = 0
        chunks[-1].append(member)
        filled += size
    return chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupClass:
    """Like recompute groups (ids) whose stages are in one segment, and which would run again in segment `end`.

    `seconds`: of all of them. `room_bytes`: the most of one of them beyond what it reads and makes. `held_bytes`: by segment, the
    blocks that only live on for the re-runs. `reads`: the blocks (ids) that they read.
    """

    groups: tuple[int, ...]
    end: int
    seconds: float
    room_bytes: int
    held_bytes: dict[int, int]
    reads: frozenset[int]


def group_classes(problem: Problem, places: RerunPlaces, grid: SegmentGrid) -> list[GroupClass]:
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
        GroupClass(
            groups=tuple(group.id for group in groups),
            end=end,
            seconds=sum(group.duration_seconds for group in groups) / problem.unit_seconds,
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
