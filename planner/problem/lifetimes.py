"""When every block of a trace exists, when it is idle, and how much memory each stage needs at least."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from planner.problem.recompute import kinds_of_places, recomputed, simple_sets
from planner.schema import Block, Tier, Trace

# Where an update runs in slices, these take at most the parameter's size divided by this, with all that it allocates.
SLICES_SHARE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class InactivePeriod:
    """The time between two consecutive uses of a movable block, or (`final`) between its last use and its death.

    `after` and `before` are the uses; `before` ≥ number of stages means the next iteration. If `final`, the block dies when
    stage `before` − 1 has ended, in whatever tier it is then: it need not come back. `epoch` numbers the stretches of the
    block's life between two writes. `rank` numbers the periods within an epoch, from the write on. A copy made in an earlier
    period of the same epoch is still valid in a later one. `read_only`: no stage ever writes the block, so a valid copy always
    exists in the steady state.
    """

    block: int
    size_bytes: int
    after: int
    before: int
    epoch: int
    rank: int
    read_only: bool
    final: bool = False

    @property
    def gap(self) -> int:
        """Number of stages strictly between the two uses."""
        return self.before - self.after - 1

    @property
    def last_leave(self) -> int:
        """The last stage after which the block may leave. A `final` block must then be away for at least one stage."""
        return self.before - 1 - self.final

    @property
    def clean(self) -> bool:
        """Whether the block can leave without a copy out, since a copy made earlier in the same epoch may still be valid."""
        return self.read_only or self.rank > 0


def inactive_periods(trace: Trace) -> tuple[InactivePeriod, ...]:
    """Return the periods of all movable blocks that contain at least one stage, by block and then by time.

    Within an epoch they are ordered by `rank`. The period of a persistent block that wraps round the iteration's end may have a
    lower rank than later periods of the same iteration.
    """
    stages = len(trace.stages)
    movable = [block for block in trace.blocks if block.movable and block.size_bytes > 0]
    return trace.once(
        inactive_periods, lambda: tuple(p for each in movable for p in periods_between_uses(each, stages) if p.gap > 0)
    )


def periods_between_uses(block: Block, stages: int) -> list[InactivePeriod]:
    """Return what lies between the consecutive uses of a block, also of adjacent stages. Within an epoch they are in the order of
    `rank`: those of a persistent block that is written begin after its first write."""
    uses = block.uses
    following = [*uses[1:], uses[0] + stages if block.persistent else block.last_stage + 1]
    writes = set(block.writes)
    read_only = block.persistent and not writes
    pairs = list(zip(uses, following, strict=True))
    if block.persistent and writes:
        # Begin just after a write, so that ranks continue over the iteration's end.
        first = next(index for index, use in enumerate(uses) if use in writes)
        pairs = pairs[first:] + pairs[:first]
    periods = []
    epoch, rank = 0, 0
    for position, (after, before) in enumerate(pairs):
        if position and after in writes:
            epoch, rank = epoch + 1, 0
        periods.append(
            InactivePeriod(
                block=block.id,
                size_bytes=block.size_bytes,
                after=after,
                before=before,
                epoch=epoch,
                rank=rank,
                read_only=read_only,
                final=not block.persistent and after == uses[-1],
            )
        )
        rank += 1
    return periods


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockActivity:
    """How long one block is used and idle, in an iteration that never waits.

    `active_fraction`: share of the iteration in which a stage uses it (0 if that takes no time). `idle_seconds`: the rest of the
    time that the block exists, in all its inactive periods. `longest_idle_seconds`: the longest of these; for a persistent block
    it may wrap round the iteration's end. `clean`: persistent and never written, so it needs no copy out in the steady state. All
    other blocks are dirty.
    """

    active_fraction: float
    idle_seconds: float
    longest_idle_seconds: float
    clean: bool


def block_activities(trace: Trace) -> tuple[BlockActivity, ...]:
    """Return the activity of every block, movable or not, by block."""
    durations = [stage.duration_seconds for stage in trace.stages]
    # Start of each stage over two iterations: a period that wraps ends in the second.
    begins = list(accumulate(durations * 2, initial=0.0))
    found = []
    for block in trace.blocks:
        active = sum(durations[stage] for stage in block.uses)
        idle = [begins[p.before] - begins[p.after + 1] for p in periods_between_uses(block, len(durations))]
        found.append(
            BlockActivity(
                active_fraction=active / trace.ideal_seconds if trace.ideal_seconds else 0.0,
                idle_seconds=sum(idle),
                longest_idle_seconds=max(idle, default=0.0),
                clean=block.persistent and not block.writes,
            )
        )
    return tuple(found)


def mean_active_fraction(trace: Trace) -> float:
    """Return the active fraction of the movable blocks, averaged by bytes: Σ size · active / (Σ size · iteration).

    0 where nothing is movable. A small value means that most of the memory could be elsewhere at any moment (TERAIO, Yuan et
    al., 2025, finds 1.7 % of the memory active on average).
    """
    movable = [(block, found) for block, found in zip(trace.blocks, block_activities(trace), strict=True) if block.movable]
    total = sum(block.size_bytes for block, _ in movable)
    return sum(block.size_bytes / total * found.active_fraction for block, found in movable) if total else 0.0


def bytes_by_stage(spans: Iterable[tuple[int, int, int]], stages: int) -> list[int]:
    """Return, for each stage, the bytes of the `spans` around it: first stage, end (exclusive), bytes. A span may wrap."""
    change = [0] * (2 * stages + 1)
    for first, end, size_bytes in spans:
        change[first] += size_bytes
        change[end] -= size_bytes
    sums = list(accumulate(change))
    return [sums[stage] + sums[stage + stages] for stage in range(stages)]


def live_bytes(trace: Trace) -> list[int]:
    """Return, for each stage, the device bytes while it runs if nothing ever leaves the device; workspace is included."""
    stages = len(trace.stages)
    spans = (
        (0, stages, block.size_bytes) if block.persistent else (block.uses[0], block.last_stage + 1, block.size_bytes)
        for block in trace.blocks
    )
    return [size + stage.workspace_bytes for size, stage in zip(bytes_by_stage(spans, stages), trace.stages, strict=True)]


def stage_floors(trace: Trace) -> list[int]:
    """Return, for each stage, its inputs + outputs + workspace + live bytes that cannot move."""
    idle = bytes_by_stage(((p.after + 1, p.before, p.size_bytes) for p in inactive_periods(trace)), len(trace.stages))
    return [live - away for live, away in zip(live_bytes(trace), idle, strict=True)]


def _sliced(trace: Trace, floors: Sequence[int]) -> list[int]:
    """Return `floors`, where states pass through the device in slices, as they do in training if the budget asks for that.

    An update then takes one parameter, its gradient and the slices. Optimizers that can do that can update on hosts.
    """
    found = list(floors)
    for subgroup in trace.subgroups:
        if subgroup.host_seconds is not None:
            movable = [trace.blocks[number] for number in subgroup.blocks if trace.blocks[number].movable]
            largest = max((block.size_bytes for block in movable if block.kind == "parameter"), default=0)
            moves = trace.stages[subgroup.stage].workspace_bytes + sum(block.size_bytes for block in movable)
            sliced = found[subgroup.stage] - moves + 2 * largest + largest // SLICES_SHARE
            found[subgroup.stage] = min(found[subgroup.stage], sliced)
    return found


def floor(trace: Trace, *, in_slices: bool = False) -> tuple[int, int]:
    """Return the smallest device budget under which every stage can run, in bytes, and the stage of the trace that sets it.

    in_slices: large parameters are updated in slices, which a trace that was made without a budget does not have.
    All updates run on the device. If no lower tier has links in both directions, nothing can leave. Then recomputation lowers the
    floor: it is the least of `simple_sets` of groups that run again. (With a lower tier it cannot: all that a stage does not use
    can wait there.)
    """
    hardware = trace.hardware
    tiers: tuple[Tier, ...] = ("host", "storage")
    if any(hardware.link("device", tier) and hardware.link(tier, "device") for tier in tiers):
        return worst_of(_sliced(trace, stage_floors(trace)) if in_slices else stage_floors(trace))
    least, worst = worst_of(live_bytes(trace))
    for chosen in (places.of(groups) for places in kinds_of_places(trace) for groups in simple_sets(trace, places.usable)):
        size, stage = worst_of(live_bytes(recomputed(trace, chosen)))
        if size < least:
            least, worst = size, min(stage - sum(each.at + n < stage for n, each in enumerate(chosen)), len(trace.stages) - 1)
    return least, worst


def worst_of(sizes: Sequence[int]) -> tuple[int, int]:
    """Return the largest of the stages' sizes, and that stage."""
    worst = max(range(len(sizes)), key=sizes.__getitem__)
    return sizes[worst], worst
