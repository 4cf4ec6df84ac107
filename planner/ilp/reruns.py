"""Forward stages that run again in the backward pass, in the coarse program: which it cannot tell apart, and their rows.

Symbols: c classes of like recompute groups (equal layers are one class, as far as they are in the same segments); κ(c) the
segment in which they run again, which is as late as possible; d_c the seconds of all their re-runs; r_c ∈ [0, 1] how many of them
run again. A block is either made anew or offloaded in the period that ends with the re-run, or neither.

What a re-run reads must be there. A block that is idle then is not away to the extent that the re-run happens (it could go and
come twice; the exact stage sees that), unless a re-run no later makes it anew. A block that would be dead by then lives on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import inf

from planner.ilp.model import CoarseModel, PeriodVariables, RerunClass
from planner.lp import SegmentGrid, Terms, Variable
from planner.problem import TIE_WEIGHT, Problem, RerunPlaces, made_bytes
from planner.schema import RecomputeGroup

__all__ = ["add_rerun_memory", "add_rerun_reads", "rerun_classes", "rerun_cost", "reruns_in"]


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


def rerun_cost(model: CoarseModel) -> Terms:
    """Σ d_c r_c · (1 + ε): of equal plans, the one that runs less again wins."""
    return [(share, each.seconds * (1 + TIE_WEIGHT)) for each, share in zip(model.reruns, model.again, strict=True)]


def reruns_in(model: CoarseModel, entry: PeriodVariables) -> list[int]:
    """Return the class of re-runs, if there is one, that makes the blocks of `entry` anew in its period."""
    number = entry.block_class.rerun
    if number is None or not entry.period.begin < model.reruns[number].end <= entry.period.end:
        return []
    return [number]


def add_rerun_memory(model: CoarseModel, rows: list[Terms], scale: float) -> None:
    """− Σ size · r_c in the segments between last use and κ(c); + Σ held bytes · r_c; + w_k, where w_κ(c) ≥ room of c · r_c."""
    seen: set[tuple[int, ...]] = set()
    for entry in model.periods:
        if entry.period.indices in seen:
            continue  # one entry for each tier
        seen.add(entry.period.indices)
        for number in reruns_in(model, entry):
            for k in range(entry.period.begin + 1, model.reruns[number].end):
                rows[k].append((model.again[number], -entry.block_class.size_bytes / scale))
    room: dict[int, Variable] = {}
    for each, share in zip(model.reruns, model.again, strict=True):
        for k, size in each.held_bytes.items():
            rows[k].append((share, size / scale))
        if not each.room_bytes:
            continue
        if each.end not in room:
            room[each.end] = model.program.variable(inf)
            rows[each.end].append((room[each.end], 1.0))
        model.program.at_least([(room[each.end], 1.0), (share, -each.room_bytes / scale)], 0)


def add_rerun_reads(problem: Problem, model: CoarseModel) -> None:
    """Σ_t (O_{κ−1} + d − I_κ) + r_c · (the share of the blocks that c reads) ≤ 1, for periods around κ(c)."""
    count = len(model.segments)
    readers: dict[int, list[int]] = defaultdict(list)
    for number, each in enumerate(model.reruns):
        for block in each.reads:
            readers[block].append(number)
    by_period: dict[tuple[int, ...], list[PeriodVariables]] = defaultdict(list)
    for entry in model.periods if readers else ():
        by_period[entry.period.indices].append(entry)
    for entries in by_period.values():
        period, block_class = entries[0].period, entries[0].block_class
        read: dict[int, int] = defaultdict(int)
        for block in block_class.blocks:
            for number in readers.get(block, ()):
                read[number] += problem.trace.blocks[block].size_bytes
        for number, size in read.items():
            for k in (model.reruns[number].end, model.reruns[number].end + count):
                if period.begin < k < period.end:
                    absent = [term for entry in entries for term in entry.absent(k - period.begin - 1)]
                    model.program.at_most([*absent, (model.again[number], size / block_class.size_bytes)], 1)
