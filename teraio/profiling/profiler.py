"""Build a trace from recorded iterations."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import planner
from runtime.paging import Block
from teraio.profiling.groups import recompute_groups
from teraio.profiling.iteration import Iteration, StageRecord
from teraio.profiling.typical import stage_seconds

FIXED_NAME = "small optimizer states"
"""The name of the block that stands for all that stays on the device without being a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A trace, the iteration that it describes, and the trace ids of its blocks."""

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
    no_reruns: str = "",
) -> Profile:
    """Return the trace of the last of `iterations`. Times are those of undisturbed stages, see [Note: Disturbed
    iterations]; the signatures must be equal.

    survivors: (region, ordinal) of the made blocks that outlive the iteration.
    fixed_bytes: what stays on the device without being a block, such as small optimizer states. It becomes one block that does
    not move. no_reruns: why no stage may run again; "" if some may.
    """
    last = iterations[-1]
    stages = last.stages
    times = stage_seconds(iterations)
    collectives = _medians([stage.collective_seconds for stage in i.stages] for i in iterations)
    uses = _Uses.of(last)
    blocks = [_block(last, uses, block, number, survivors) for block, number in uses.ids.items()]
    if fixed_bytes:
        blocks.append(_fixed_block(len(blocks), fixed_bytes, [s.phase for s in stages]))
    groups, not_recomputed = recompute_groups(stages, times, blocks, uses.ids, against=no_reruns)
    trace = planner.Trace(
        name=name,
        created_by=created_by,
        hardware=hardware,
        stages=tuple(
            planner.Stage(
                id=position,
                name=s.name,
                phase=s.phase,
                duration_seconds=seconds,
                workspace_bytes=s.workspace_bytes,
                collective_seconds=min(inside, seconds),
            )
            for position, (s, seconds, inside) in enumerate(zip(stages, times, collectives, strict=True))
        ),
        blocks=tuple(blocks),
        subgroups=_subgroups(stages, times, uses.ids),
        recompute=groups,
        not_recomputed=not_recomputed,
    )
    return Profile(trace=trace, iteration=last, ids=uses.ids)


def _medians(iterations: Iterable[Sequence[float]]) -> list[float]:
    """Return the median of each stage's values. iterations: the values of all stages, for each iteration."""
    return [statistics.median(values) for values in zip(*iterations, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Uses:
    """Where an iteration uses its blocks.

    ids: trace ids, in the order of first use. reads, writes: positions, ascending. made: (region, ordinal) of the blocks that
    it creates.
    """

    ids: dict[Block, int]
    reads: dict[Block, list[int]]
    writes: dict[Block, list[int]]
    made: dict[Block, tuple[int, int]]

    @classmethod
    def of(cls, iteration: Iteration) -> _Uses:
        ids: dict[Block, int] = {}
        reads: dict[Block, list[int]] = {}
        writes: dict[Block, list[int]] = {}
        for position, stage in enumerate(iteration.stages):
            # In other iterations, an update reads the state that it makes, or replaces by a new tensor, in this one.
            states = [block for block in stage.made if block.kind == "optimizer_state"]
            for uses, used in ((reads, (*stage.read, *states)), (writes, (*stage.made, *stage.written))):
                for block in dict.fromkeys(used):
                    ids.setdefault(block, len(ids))
                    uses.setdefault(block, []).append(position)
        for region, following in pairwise(iteration.regions):
            for block in region.made:
                if block.user_visible and block.kind == "activation":  # a model's output: user code reads it next
                    reads.setdefault(block, []).append(following.first)
        made = {block: (i, n) for i, region in enumerate(iteration.regions) for n, block in enumerate(region.made)}
        return cls(ids=ids, reads=reads, writes=writes, made=made)


def _block(iteration: Iteration, uses: _Uses, block: Block, number: int, survivors: set[tuple[int, int]]) -> planner.Block:
    reads, writes = uses.reads.get(block, []), uses.writes.get(block, [])
    first, last = min((*reads, *writes)), max((*reads, *writes))
    kept = block.kind == "optimizer_state"
    made = uses.made.get(block)
    external = not kept and made is None and block.born == iteration.number  # created by user code
    persistent = kept or (made in survivors if made is not None else not external)
    outlives = block.kind == "gradient" and not persistent and block in iteration.held
    end = len(iteration.stages) - 1
    return planner.Block(
        id=number,
        name=block.name,
        kind=block.kind,
        size_bytes=block.size_bytes,
        persistent=persistent,
        reads=tuple(sorted(reads)),
        writes=tuple(sorted({*writes, *([_user_stage_before(iteration, first)] if external else [])})),
        movable=block.span is not None,
        dies_after=end if outlives and last < end else None,
    )


def states_that_stay(blocks: Iterable[Block], ids: Container[Block]) -> Counter[str]:
    """Return, by tier, the bytes of the slots of states that no stage has on the device, see [Note: Updates by slices].

    ids: the blocks of the trace; these states are not among them.
    """
    taken: Counter[str] = Counter()
    for block in blocks:
        if block.kind == "optimizer_state" and block not in ids and block.slot is not None and block.tier is not None:
            taken[block.tier] += block.slot.size_bytes
    return taken


def _user_stage_before(iteration: Iteration, position: int) -> int:
    """Return the position of the user code before the region of `position`: there, the inputs of the region were created."""
    return max(region.first for region in iteration.regions if region.first <= position)


def _subgroups(stages: Sequence[StageRecord], times: Sequence[float], ids: dict[Block, int]) -> tuple[planner.Subgroup, ...]:
    """Return one subgroup for each stage that updates parameters."""
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
        name=FIXED_NAME,
        kind="optimizer_state",
        size_bytes=size_bytes,
        persistent=True,
        reads=steps,
        writes=steps,
        movable=False,
    )
