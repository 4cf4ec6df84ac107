"""Trace → when every block exists, when it is idle, and what each stage needs at the least."""

from __future__ import annotations

from dataclasses import dataclass

from planner.trace import Block, Trace

__all__ = ["InactivePeriod", "floor", "inactive_periods", "live_bytes", "stage_need_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InactivePeriod:
    """The time between two consecutive uses of a movable block.

    `after` and `before` are the uses; `before` ≥ number of stages means the next iteration. `epoch` numbers
    the stretches of the block's life between two writes, and `rank` the periods within a stretch, from the
    write on. A copy made in an earlier period of the same epoch is still valid in a later one.
    `frozen`: no stage ever writes the block, so in the steady state a valid copy always exists.
    """

    block: int
    size_bytes: int
    after: int
    before: int
    epoch: int
    rank: int
    frozen: bool

    @property
    def gap(self) -> int:
        """Number of stages strictly between the two uses."""
        return self.before - self.after - 1


def inactive_periods(trace: Trace) -> tuple[InactivePeriod, ...]:
    """All periods of all movable blocks that have at least one stage in between, by block and then by time.

    Within an epoch the order is that of `rank`; a persistent block's wrapping period may come before later
    ones of the same iteration in rank.
    """
    periods: list[InactivePeriod] = []
    for block in trace.blocks:
        if block.movable and block.size_bytes > 0:
            periods.extend(p for p in _periods_of(block, len(trace.stages)) if p.gap > 0)
    return tuple(periods)


def _periods_of(block: Block, stages: int) -> list[InactivePeriod]:
    uses = block.uses
    following = list(uses[1:]) + ([uses[0] + stages] if block.persistent else [])
    writes = set(block.writes)
    frozen = block.persistent and not writes
    pairs = list(zip(uses, following, strict=False))
    if block.persistent and writes:
        # Begin just after a write, so that ranks run on across the iteration's end.
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
                frozen=frozen,
            )
        )
        rank += 1
    return periods


def stage_need_bytes(trace: Trace) -> list[int]:
    """Per stage: bytes that come into being when it starts (outputs born there, and workspace)."""
    need = [stage.workspace_bytes for stage in trace.stages]
    for block in trace.blocks:
        if not block.persistent:
            need[block.uses[0]] += block.size_bytes
    return need


def live_bytes(trace: Trace) -> list[int]:
    """Per stage: device bytes while it runs if nothing ever leaves the device, workspace included."""
    change = [0] * (len(trace.stages) + 1)
    for block in trace.blocks:
        first, last = (0, len(trace.stages) - 1) if block.persistent else (block.uses[0], block.uses[-1])
        change[first] += block.size_bytes
        change[last + 1] -= block.size_bytes
    live, total = [], 0
    for stage, delta in zip(trace.stages, change, strict=False):
        total += delta
        live.append(total + stage.workspace_bytes)
    return live


def stage_floors(trace: Trace) -> list[int]:
    """Per stage: inputs + outputs + workspace + live bytes that cannot move."""
    floors = live_bytes(trace)
    stages = len(trace.stages)
    for period in inactive_periods(trace):
        for stage in range(period.after + 1, period.before):
            floors[stage % stages] -= period.size_bytes
    return floors


def floor(trace: Trace) -> tuple[int, int]:
    """The smallest device budget under which every stage can run, in bytes, and the stage that sets it."""
    floors = stage_floors(trace)
    worst = max(range(len(floors)), key=floors.__getitem__)
    return floors[worst], worst
