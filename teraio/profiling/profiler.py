"""Turns recorded iterations into a trace."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import planner
from runtime.paging import Block
from teraio.profiling.iteration import Iteration, StageRecord


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
    fixed_bytes: int,
    survivors: set[tuple[int, int]],
) -> Profile:
    """The trace of the last of `iterations`, which must have equal signatures; times are medians over all of them.

    survivors: (region, ordinal) of made blocks that outlive the iteration. fixed_bytes: what is on the device all the time
    and no block, such as small optimizer states; it becomes one block that does not move.
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
        # An update that makes a state, or puts a new tensor in its place, reads the state in every other iteration.
        states = [block for block in stage.made if block.kind == "optimizer_state"]
        for uses, used in ((reads, (*stage.read, *states)), (writes, (*stage.made, *stage.written))):
            for block in dict.fromkeys(used):
                ids.setdefault(block, len(ids))
                uses.setdefault(block, []).append(position)
    for region, following in pairwise(last.regions):
        for block in region.made:
            if block.user_visible and block.kind == "activation":  # a model's output: user code has it next
                reads.setdefault(block, []).append(following.first)
    blocks = []
    for block, number in ids.items():
        first = min((*reads.get(block, ()), *writes.get(block, ())))
        kept = block.kind == "optimizer_state"
        external = not kept and block not in made_here and block.born == last.number
        persistent = kept or made_here.get(block, not external)
        outlives = block.kind == "gradient" and not persistent and block in last.held
        final = max((*reads.get(block, ()), *writes.get(block, ())))
        blocks.append(
            planner.Block(
                id=number,
                name=block.name,
                kind=block.kind,
                size_bytes=block.size_bytes,
                persistent=persistent,
                reads=tuple(sorted(reads.get(block, ()))),
                writes=tuple(sorted({*writes.get(block, ()), *([_user_stage_before(last, first)] if external else [])})),
                movable=block.span is not None,
                dies_after=len(stages) - 1 if outlives and final < len(stages) - 1 else None,
            )
        )
    subgroups = _subgroups(stages, times, ids)
    if fixed_bytes:
        blocks.append(_fixed_block(len(blocks), fixed_bytes, [s.phase for s in stages]))
    trace = planner.Trace(
        name=name,
        created_by=created_by,
        hardware=hardware,
        stages=tuple(
            planner.Stage(id=position, name=s.name, phase=s.phase, duration_seconds=seconds, workspace_bytes=s.workspace_bytes)
            for position, (s, seconds) in enumerate(zip(stages, times, strict=True))
        ),
        blocks=tuple(blocks),
        subgroups=subgroups,
    )
    return Profile(trace=trace, iteration=last, ids=ids)


def states_that_stay(blocks: Iterable[Block], ids: Container[Block]) -> Counter[str]:
    """Bytes by tier of the slots of states that no stage has on the device, see [Note: Updates by slices]. ids: of the trace."""
    taken: Counter[str] = Counter()
    for block in blocks:
        if block.kind == "optimizer_state" and block not in ids and block.slot is not None and block.tier is not None:
            taken[block.tier] += block.slot.size_bytes
    return taken


def _user_stage_before(iteration: Iteration, position: int) -> int:
    """Position of the user code before the region that `position` lies in; what came from there exists since then."""
    return max(region.first for region in iteration.regions if region.first <= position)


def _subgroups(stages: Sequence[StageRecord], times: Sequence[float], ids: dict[Block, int]) -> tuple[planner.Subgroup, ...]:
    """One for each stage that updates something."""
    updating = [(place, stage, time) for place, (stage, time) in enumerate(zip(stages, times, strict=True)) if stage.elements]
    return tuple(
        planner.Subgroup(
            id=number,
            stage=place,
            blocks=tuple(sorted({ids[block] for block in (*stage.read, *stage.made)})),
            elements=stage.elements,
            device_seconds=seconds,
            host_seconds=stage.host_seconds,
        )
        for number, (place, stage, seconds) in enumerate(updating)
    )


def _fixed_block(number: int, size_bytes: int, phases: Sequence[str]) -> planner.Block:
    steps = tuple(i for i, phase in enumerate(phases) if phase == "optimizer") or (len(phases) - 1,)
    return planner.Block(
        id=number,
        name="small optimizer states",
        kind="optimizer_state",
        size_bytes=size_bytes,
        persistent=True,
        reads=steps,
        writes=steps,
        movable=False,
    )
