"""The recompute groups that the lower bound considers, with like ones put together."""

from __future__ import annotations

from dataclasses import dataclass

from planner.bound.windows import Instants
from planner.problem import Problem, made_bytes
from planner.schema import RecomputeGroup, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunClass:
    """Groups (ids) whose blocks have the same windows, and sizes and times in the same proportions.

    `spans`: those in which one of them may run again. `seconds`: at most those of all their re-runs.
    """

    groups: tuple[int, ...]
    spans: frozenset[int]
    seconds: float


def rerun_classes(problem: Problem, instants: Instants, *, apart: bool) -> tuple[RerunClass, ...]:
    """Return the groups of the trace; like ones form one class, unless all are kept `apart`. Times are in the problem's unit."""
    found: dict[tuple[object, ...], list[RecomputeGroup]] = {}
    latest = _latest_places(problem.source)
    for group in problem.source.recompute:
        if made_bytes(problem.source, group):
            key = (group.id,) if apart else _rerun_likeness(problem.source, instants, group)
            found.setdefault(key, []).append(group)
    classes = []
    for groups in found.values():
        sizes = [made_bytes(problem.source, group) for group in groups]
        per_byte = min(group.duration_seconds / size for group, size in zip(groups, sizes, strict=True))
        spans = (_spans(problem.source, instants, group, latest[group.id]) for group in groups)
        classes.append(
            RerunClass(
                groups=tuple(group.id for group in groups),
                spans=frozenset(instants.like(k) for each in spans for k in each),
                seconds=per_byte * sum(sizes) / problem.unit_seconds,
            )
        )
    return tuple(classes)


def _spans(trace: Trace, instants: Instants, group: RecomputeGroup, last: int) -> range:
    """The spans in which a group may run again: before the first backward stage after its own at the earliest, before stage
    `last` at the latest.
    """
    later = range(group.stage + 1, last + 1)
    first = next((stage for stage in later if trace.stages[stage].phase == "backward"), None)
    return range(0) if first is None else range(instants.end_of(first - 1), instants.start_of(last))


def _latest_places(trace: Trace) -> dict[int, int]:
    """By group, the last stage before which it may run again: the last use of what it makes, by a stage or by a re-run."""
    places: dict[int, int] = {}
    read: dict[int, int] = {}  # by block, until when a group that reads it may run again
    for group in sorted(trace.recompute, key=lambda group: -group.stage):
        places[group.id] = max(max(trace.blocks[block].uses[-1], read.get(block, 0)) for block in group.blocks)
        for block in group.reads:
            read[block] = max(places[group.id], read.get(block, 0))
    return places


def visits(trace: Trace) -> dict[int, list[range]]:
    """Return, by block that some group reads, ranges of stages before which such a group may run again.

    A group runs again after its stage, and not after the last use of what it makes.
    """
    latest = _latest_places(trace)
    found: dict[int, list[range]] = {}
    for group in trace.recompute:
        for block in group.reads:
            found.setdefault(block, []).append(range(group.stage + 1, latest[group.id] + 1))
    return found


def _rerun_likeness(trace: Trace, instants: Instants, group: RecomputeGroup) -> tuple[object, ...]:
    """Equal for groups whose blocks fall into the same classes, each with the same share of the group's bytes."""

    def ends_by(stage: int) -> int:
        return instants.like(instants.start_of(stage) - 1)

    size = made_bytes(trace, group)
    blocks = []
    for number in group.blocks:
        block = trace.blocks[number]
        uses = tuple(
            (instants.like(instants.end_of(use)), ends_by(use), use in block.writes, use + 1 in block.uses) for use in block.uses
        )
        dies = None if block.dies_after is None else (ends_by(block.dies_after + 1), block.dies_after - block.uses[-1] > 1)
        blocks.append((uses, str(dies), round(block.size_bytes / size, 9)))
    # Their times need only be close, since the least of them counts.
    return (*sorted(blocks), f"{group.duration_seconds / size:.1e}")
