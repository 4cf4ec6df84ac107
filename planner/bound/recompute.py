"""Recompute groups in the lower bound: blocks that are absent because they are made anew, and the time that this takes.

Symbols as in `planner.bound.model`, and

* R_{c,k} ∈ [0, 1]: how much of the groups of class c runs again in span k; d_c: the seconds of all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.bound.model import BoundModel
from planner.bound.windows import CopyClass, CopyWindow, Instants
from planner.lp import Terms
from planner.problem import InactivePeriod, Problem, made_bytes
from planner.schema import RecomputeGroup, Trace

__all__ = ["RerunClass", "add_reruns", "made_anew", "made_by", "recreatable_bytes", "rerun_classes", "visits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunClass:
    """Groups (ids) whose blocks have the same windows, and sizes and times in the same proportions.

    `spans`: those in which one of them may run again, over the iteration's end perhaps. `seconds`: at most those of all their
    re-runs.
    """

    groups: tuple[int, ...]
    spans: range
    seconds: float


def rerun_classes(problem: Problem, instants: Instants, *, apart: bool, unit_seconds: float) -> tuple[RerunClass, ...]:
    """Return the groups of the trace; like ones form one class, unless all are kept `apart`. Times are in `unit_seconds`."""
    found: dict[tuple[object, ...], list[RecomputeGroup]] = {}
    latest = _latest_places(problem.source)
    for group in problem.source.recompute:
        if made_bytes(problem.source, group):
            key = (group.id,) if apart else _likeness(problem.source, instants, group)
            found.setdefault(key, []).append(group)
    classes = []
    for groups in found.values():
        sizes = [made_bytes(problem.source, group) for group in groups]
        per_byte = min(group.duration_seconds / size for group, size in zip(groups, sizes, strict=True))
        spans = [_spans(problem.source, instants, group, latest[group.id]) for group in groups]
        classes.append(
            RerunClass(
                groups=tuple(group.id for group in groups),
                spans=range(min(each.start for each in spans), max(each.stop for each in spans)),
                seconds=per_byte * sum(sizes) / unit_seconds,
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


def made_by(problem: Problem, classes: Sequence[RerunClass]) -> dict[int, int]:
    """Return, by block, the number of the class that makes it anew."""
    groups = problem.source.recompute
    return {block: number for number, each in enumerate(classes) for group in each.groups for block in groups[group].blocks}


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


def recreatable_bytes(problem: Problem, periods: Iterable[InactivePeriod]) -> int:
    """Return the bytes of the blocks of `periods` that a group makes."""
    made = {block for group in problem.source.recompute for block in group.blocks}
    return sum(period.size_bytes for period in periods if period.block in made)


def add_reruns(model: BoundModel, classes: Sequence[RerunClass]) -> None:
    """Add R: Σ_k R_{c,k} ≤ 1, and Σ_c d_c R_{c,k} ≤ δ_k, since re-runs take time beyond the stages."""
    taken: dict[int, Terms] = defaultdict(list)
    for each in classes:
        spans = {k % len(model.instants) for k in each.spans}
        shares = {k: model.variable(whole=True) for k in sorted(spans) if model.stall[k] is not None}
        model.again.append(shares)
        if len(shares) > 1:
            model.program.at_most([(share, 1.0) for share in shares.values()], 1)
        for k, share in shares.items():
            taken[k].append((share, each.seconds))
    for k, terms in taken.items():
        stall = model.stall[k]
        assert stall is not None  # otherwise nothing runs again there
        model.program.at_most([*terms, (stall, -1.0)], 0)


def made_anew(model: BoundModel, block_class: CopyClass, window: CopyWindow) -> dict[int, Terms]:
    """Σ R_c over the spans of the window from k on, by instant k inside it: the share that is absent until it is made anew."""
    anew: dict[int, Terms] = {k: [] for k in window.inside}
    if block_class.rerun is None or (window.final and not window.visited):
        return anew
    shares, count = model.again[block_class.rerun], len(model.instants)
    later: Terms = []
    for k in reversed(window.inside):
        if k % count in shares:
            later = [(shares[k % count], 1.0), *later]
        anew[k] = later
    return anew


def _likeness(trace: Trace, instants: Instants, group: RecomputeGroup) -> tuple[object, ...]:
    """Equal for groups whose blocks fall into the same classes, each with the same share of the group's bytes.

    Their times need only be close, since the least of them counts.
    """
    size = made_bytes(trace, group)
    blocks = []
    for number in group.blocks:
        block = trace.blocks[number]
        uses = tuple(
            (instants.end_of(use), instants.start_of(use), use in block.writes, use + 1 in block.uses) for use in block.uses
        )
        dies = (
            None if block.dies_after is None else (instants.start_of(block.dies_after + 1), block.dies_after - block.uses[-1] > 1)
        )
        blocks.append((uses, str(dies), round(block.size_bytes / size, 9)))
    return (*sorted(blocks), f"{group.duration_seconds / size:.1e}")
