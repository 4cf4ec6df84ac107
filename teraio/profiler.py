"""Turns recorded iterations into a trace."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import planner
from runtime.block import Block
from teraio.timeline import Iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A trace, the iteration it describes, and which block has which id in it."""

    trace: planner.Trace
    iteration: Iteration
    ids: dict[Block, int]


def build_profile(
    iterations: Sequence[Iteration],
    *,
    name: str,
    created_by: str,
    hardware: planner.Hardware,
    optimizer_state_bytes: int,
    survivors: set[tuple[int, int]],
) -> Profile:
    """The trace of the last of `iterations`, which must have equal signatures; times are medians over all of them.

    survivors: (region, ordinal) of made blocks that outlive the iteration. Optimizer state becomes one block that
    does not move.
    """
    last = iterations[-1]
    stages = last.stages
    times = [statistics.median(seconds) for seconds in zip(*([s.seconds for s in i.stages] for i in iterations), strict=True)]
    ids: dict[Block, int] = {}
    reads: dict[Block, list[int]] = {}
    writes: dict[Block, list[int]] = {}
    made_here: dict[Block, bool] = {}
    for index, region in enumerate(last.regions):
        for ordinal, block in enumerate(region.made):
            made_here[block] = (index, ordinal) in survivors
    for position, stage in enumerate(stages):
        for uses, used in ((reads, stage.read), (writes, (*stage.made, *stage.written))):
            for block in dict.fromkeys(used):
                ids.setdefault(block, len(ids))
                uses.setdefault(block, []).append(position)
    blocks = []
    for block, number in ids.items():
        first = min((*reads.get(block, ()), *writes.get(block, ())))
        external = block not in made_here and block.born == last.number
        blocks.append(
            planner.Block(
                id=number,
                name=block.name,
                kind=block.kind,
                size_bytes=block.size_bytes,
                persistent=made_here.get(block, not external),
                reads=tuple(reads.get(block, ())),
                writes=tuple(sorted({*writes.get(block, ()), *([_user_stage_before(last, first)] if external else [])})),
                movable=block.span is not None,
            )
        )
    if optimizer_state_bytes:
        blocks.append(_state_block(len(blocks), optimizer_state_bytes, [s.phase for s in stages]))
    trace = planner.Trace(
        name=name,
        created_by=created_by,
        hardware=hardware,
        stages=tuple(
            planner.Stage(
                id=position, name=s.name, phase=s.phase, duration_seconds=seconds, workspace_bytes=s.workspace_bytes
            )
            for position, (s, seconds) in enumerate(zip(stages, times, strict=True))
        ),
        blocks=tuple(blocks),
    )
    return Profile(trace=trace, iteration=last, ids=ids)


def _user_stage_before(iteration: Iteration, position: int) -> int:
    """Position of the user code before the region that `position` lies in; what came from there exists since then."""
    return max(region.first for region in iteration.regions if region.first <= position)


def _state_block(number: int, size_bytes: int, phases: Sequence[str]) -> planner.Block:
    steps = tuple(i for i, phase in enumerate(phases) if phase == "optimizer") or (len(phases) - 1,)
    return planner.Block(
        id=number,
        name="optimizer state",
        kind="optimizer_state",
        size_bytes=size_bytes,
        persistent=True,
        reads=steps,
        writes=steps,
        movable=False,
    )
