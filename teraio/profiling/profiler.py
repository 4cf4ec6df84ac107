"""Builds a trace from recorded iterations. Reads no clock.

[Note: Disturbed iterations]
Another program on the same machine makes some stages of some iterations slower, and none faster. So a stage's time is the median
of those measurements that are near the fastest one: as precise as a median, but it stays right if most iterations were disturbed.
The time of user code is the median of all, since user code does not do the same in each iteration.

A fastest measurement that no other one confirms may itself be disturbed. If too much of the time is in such stages, more
iterations are profiled. A disturbance that lasts through all of them shows only later, see [Note: Planning again] in
`teraio.following.follower`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import planner
from runtime.paging import Block
from teraio.profiling.iteration import Iteration, StageRecord, undisturbed

# The name of the block that stands for all that stays on the device without being a block.
FIXED_NAME = "small optimizer states"
_UNSURE = 0.1  # share of the time that may be in stages with a single undisturbed measurement
_ENOUGH_TO_JUDGE = 3  # with fewer iterations, whoever has asked for so few gets what they say


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A trace, the iteration that it describes, and the trace ids of its blocks.

    samples: the profiles of inputs of several lengths that its trace is from, see `with_lengths`; this one last.
    """

    trace: planner.Trace
    iteration: Iteration
    ids: dict[Block, int]
    samples: tuple[Profile, ...] = ()

    @property
    def made_bytes(self) -> int:
        """`Iteration.made_bytes` of an iteration with the sizes of the trace, which may be others than those of `iteration`."""
        return sum(self.trace.blocks[self.ids[block]].size_bytes for block in self.iteration.made() if block in self.ids)


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
    times = _stage_seconds(iterations)
    runs = zip(*(iteration.stages for iteration in iterations), strict=True)
    collectives = [statistics.median(stage.collective_seconds for stage in of_one) for of_one in runs]
    uses = _Uses.of(last)
    blocks = [_block(last, uses, block, number, survivors) for block, number in uses.ids.items()]
    if fixed_bytes:
        blocks.append(_fixed_block(len(blocks), fixed_bytes, [s.phase for s in stages]))
    groups, not_recomputed = _recompute_groups(stages, times, blocks, uses.ids, against=no_reruns)
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
    created = [max(region.first for region in iteration.regions if region.first <= first)] if external else []
    outlives = block.kind == "gradient" and not persistent and block in iteration.held
    end = len(iteration.stages) - 1
    return planner.Block(
        id=number,
        name=block.name,
        kind=block.kind,
        size_bytes=block.size_bytes,
        persistent=persistent,
        reads=tuple(sorted(reads)),
        writes=tuple(sorted({*writes, *created})),
        movable=block.span is not None,
        dies_after=end if outlives and last < end else None,
    )


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


# -- stages that can run again


def _recompute_groups(
    stages: Sequence[StageRecord],
    times: Sequence[float],
    blocks: Sequence[planner.Block],
    ids: Mapping[Block, int],
    *,
    against: str = "",
) -> tuple[tuple[planner.RecomputeGroup, ...], tuple[planner.NotRecomputed, ...]]:
    """Return the groups, and the stages that make something for the backward pass but cannot run again, with the reason.

    times: seconds of each stage. blocks: of the trace. ids: their trace ids. against: a reason that holds for all of them.
    """
    used: list[list[planner.Block]] = [[] for _ in stages]
    for block in blocks:
        for use in block.uses:
            used[use].append(block)
    groups: list[planner.RecomputeGroup] = []
    others: list[planner.NotRecomputed] = []
    for position, stage in enumerate(stages):
        if stage.phase != "forward":
            continue
        wanted = [ids[b] for b in stage.made if _for_backward(b, blocks[ids[b]], position, stages)]
        if wanted and (reason := against or stage.never_again or _kept_result(stage, blocks, ids)):
            others.append(planner.NotRecomputed(stage=position, reason=reason))
        elif wanted:
            unwanted = sum(block.size_bytes for block in stage.made if ids[block] not in wanted)
            before = {block.id for block in used[position] if block.persistent or block.uses[0] < position}
            groups.append(
                planner.RecomputeGroup(
                    id=len(groups),
                    stage=position,
                    blocks=tuple(sorted(wanted)),
                    reads=tuple(sorted(before)),
                    duration_seconds=times[position],
                    workspace_bytes=stage.workspace_bytes + unwanted,
                )
            )
    return tuple(groups), tuple(others)


def _kept_result(stage: StageRecord, blocks: Sequence[planner.Block], ids: Mapping[Block, int]) -> str:
    """Return which result of the stage outlives the iteration, as a reason; "" if none does. To a trace, the stage changes it."""
    kept = (block.name for block in stage.made if blocks[ids[block]].persistent)
    return next((f"it makes {name}, which your code keeps beyond the end of the iteration" for name in kept), "")


def _for_backward(made: Block, block: planner.Block, made_in: int, stages: Sequence[StageRecord]) -> bool:
    if made.span is None or made.user_visible or made.kind != "activation":
        return False
    if block.persistent or block.dies_after is not None or block.uses[0] != made_in:
        return False
    return any(stages[use].phase == "backward" for use in block.uses)


# -- times, see [Note: Disturbed iterations]


def _stage_seconds(iterations: Sequence[Iteration]) -> list[float]:
    """Return the seconds of each stage while nothing disturbs it, by position. The iterations must have equal signatures."""
    return [statistics.median(times if phase == "user" else undisturbed(times)) for phase, times in _measurements(iterations)]


def times_agree(iterations: Sequence[Iteration]) -> bool:
    """Return whether at least two of the iterations agree about most of the time that compiled stages and updates take."""
    if len(iterations) < _ENOUGH_TO_JUDGE:
        return True
    stages = [times for phase, times in _measurements(iterations) if phase != "user"]
    typical = [statistics.median(times) for times in stages]
    unsure = sum(seconds for seconds, times in zip(typical, stages, strict=True) if len(undisturbed(times)) < 2)
    return unsure <= _UNSURE * sum(typical)


def _measurements(iterations: Sequence[Iteration]) -> list[tuple[str, list[float]]]:
    """Return the phase of each stage with its seconds in each iteration, by position. Without those in which the allocator had to
    take memory away, if there are others."""
    runs = zip(*(iteration.stages for iteration in iterations), strict=True)
    return [(stages[0].phase, [s.seconds for s in stages if not s.retried] or [s.seconds for s in stages]) for stages in runs]
