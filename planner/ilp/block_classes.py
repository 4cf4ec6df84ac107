"""Blocks that the integer program cannot tell apart at its resolution, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from planner.lp import SegmentGrid
from planner.problem import Problem
from planner.schema import Link, Subgroup

__all__ = ["BlockClass", "ClassPeriod", "classes_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassPeriod:
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

    `subgroup`: the subgroup that all of them belong to, if it can update on the host. `user_visible`: user code can reach them.
    `rerun`: the class of re-runs that makes all of them anew, if the program decides about re-runs.
    """

    blocks: tuple[int, ...]
    size_bytes: int
    read_only: bool
    persistent: bool
    first_segment: int
    last_segment: int
    periods: tuple[ClassPeriod, ...]
    subgroup: int | None = None
    user_visible: bool = False
    rerun: int | None = None

    def seconds(self, link: Link) -> float:
        """Return the time that all members together occupy a link."""
        return len(self.blocks) * link.latency_seconds + self.size_bytes / link.bytes_per_second


def classes_of(
    problem: Problem,
    grid: SegmentGrid,
    subgroups: Sequence[Subgroup] = (),
    *,
    largest_bytes: int,
    rerun_of: Mapping[int, int] | None = None,
) -> tuple[BlockClass, ...]:
    """Group blocks by the segments of their periods. A class holds at most `largest_bytes`, or one block.

    Blocks of different `subgroups` are in different classes. rerun_of: by block, the class of re-runs that makes it anew; blocks
    of different ones are in different classes, too.
    """
    rerun_of = rerun_of or {}
    owner = {block: subgroup.id for subgroup in subgroups for block in subgroup.blocks}
    by_block: dict[int, list[_Idle]] = {}
    for index, period in enumerate(problem.periods):
        begin, end = grid.end_of(period.after), grid.start_of(period.before)
        if end - begin >= 2:
            idle = (begin, end, period.epoch, period.rank, period.final)
            by_block.setdefault(period.block, []).append((idle, index))
    groups: dict[tuple[object, ...], list[int]] = {}
    for block_id, entries in by_block.items():
        block = problem.trace.blocks[block_id]
        shape = tuple(idle for idle, _ in entries)
        key = (owner.get(block_id), rerun_of.get(block_id), block.kind, block.persistent, not block.writes, shape)
        groups.setdefault(key, []).append(block_id)
    classes = []
    for members in groups.values():
        for chunk in _chunks(problem, members, largest_bytes):
            made = _class(problem, chunk, by_block, grid)
            classes.append(replace(made, subgroup=owner.get(chunk[0]), rerun=rerun_of.get(chunk[0])))
    return tuple(classes)


_Idle = tuple[tuple[int, int, int, int, bool], int]
"""(begin, end, epoch, rank, final) of a period in segments, and its position in `Problem.periods`."""


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


def _class(
    problem: Problem,
    members: list[int],
    by_block: dict[int, list[_Idle]],
    grid: SegmentGrid,
) -> BlockClass:
    blocks = [problem.trace.blocks[member] for member in members]
    pattern = by_block[members[0]]
    return BlockClass(
        blocks=tuple(members),
        size_bytes=sum(block.size_bytes for block in blocks),
        read_only=blocks[0].persistent and not blocks[0].writes,
        persistent=blocks[0].persistent,
        user_visible=blocks[0].user_visible,
        first_segment=min(grid.span_of(block.uses[0]) for block in blocks),
        last_segment=max(grid.span_of(block.last_stage) for block in blocks),
        periods=tuple(
            ClassPeriod(
                begin=begin,
                end=end,
                epoch=epoch,
                rank=rank,
                final=final,
                indices=tuple(by_block[member][position][1] for member in members),
            )
            for position, ((begin, end, epoch, rank, final), _) in enumerate(pattern)
        ),
    )
