"""Recompute groups in the lower bound: blocks that are absent because they are made anew, and the time that this takes.

Symbols as in `planner.bound.model`, and

* r_c ∈ [0, 1]: how much of the groups of class c runs again; d_c: the seconds of all of them.
* z_{p} ∈ [0, 1]: the share of a class of blocks that is made anew in window p.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.bound.model import BoundModel
from planner.bound.windows import CopyClass, Instants
from planner.lp import Terms
from planner.problem import InactivePeriod, Problem, made_bytes
from planner.schema import RecomputeGroup, Trace

__all__ = ["RerunClass", "add_anew", "add_rerun_time", "made_by", "recreatable_bytes", "rerun_classes", "visits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunClass:
    """Groups (ids) whose blocks have the same windows, and sizes and times in the same proportions.

    `seconds`: at most those of all their re-runs.
    """

    groups: tuple[int, ...]
    seconds: float


def rerun_classes(problem: Problem, instants: Instants, *, apart: bool, unit_seconds: float) -> tuple[RerunClass, ...]:
    """Return the groups of the trace; like ones form one class, unless all are kept `apart`. Times are in `unit_seconds`."""
    found: dict[tuple[object, ...], list[RecomputeGroup]] = {}
    for group in problem.source.recompute:
        if made_bytes(problem.source, group):
            key = (group.id,) if apart else _likeness(problem.source, instants, group)
            found.setdefault(key, []).append(group)
    classes = []
    for groups in found.values():
        sizes = [made_bytes(problem.source, group) for group in groups]
        per_byte = min(group.duration_seconds / size for group, size in zip(groups, sizes, strict=True))
        classes.append(RerunClass(groups=tuple(group.id for group in groups), seconds=per_byte * sum(sizes) / unit_seconds))
    return tuple(classes)


def made_by(problem: Problem, classes: Sequence[RerunClass]) -> dict[int, int]:
    """Return, by block, the number of the class that makes it anew."""
    groups = problem.source.recompute
    return {block: number for number, each in enumerate(classes) for group in each.groups for block in groups[group].blocks}


def visits(trace: Trace) -> dict[int, list[range]]:
    """Return, by block that some group reads, ranges of stages before which such a group may run again.

    A group runs again after its stage, and not after the last use of what it makes.
    """
    latest: dict[int, int] = {}  # by block, until when a group that reads it may run again
    found: dict[int, list[range]] = {}
    for group in sorted(trace.recompute, key=lambda group: -group.stage):
        last = max(max(trace.blocks[block].uses[-1], latest.get(block, 0)) for block in group.blocks)
        for block in group.reads:
            latest[block] = max(last, latest.get(block, 0))
            found.setdefault(block, []).append(range(group.stage + 1, last + 1))
    return found


def recreatable_bytes(problem: Problem, periods: Iterable[InactivePeriod]) -> int:
    """Return the bytes of the blocks of `periods` that a group makes."""
    made = {block for group in problem.source.recompute for block in group.blocks}
    return sum(period.size_bytes for period in periods if period.block in made)


def add_anew(model: BoundModel, block_class: CopyClass) -> list[Terms]:
    """z_p for each window of a class, as terms; Σ_p z_p ≤ r_c."""
    if block_class.rerun is None:
        return [[] for _ in block_class.windows]
    anew: list[Terms] = []
    for window in block_class.windows:
        inside = window.inside and not window.final
        anew.append([(model.variable(whole=True), 1.0)] if inside else [])
    used = [term for terms in anew for term in terms]
    if used:
        model.program.at_most([*used, (model.again[block_class.rerun], -1.0)], 0)
    return anew


def add_rerun_time(model: BoundModel, classes: Sequence[RerunClass]) -> None:
    """Σ δ_k ≥ Σ d_c r_c: what runs again takes time beyond the stages."""
    row: Terms = [(share, -each.seconds) for each, share in zip(classes, model.again, strict=True) if each.seconds]
    if row:
        row += [(stall, 1.0) for stall in model.stall if stall is not None]
        model.program.at_least(row, 0)


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
