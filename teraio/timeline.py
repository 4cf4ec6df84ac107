"""The order in which stages run: records every iteration, knows when blocks are needed next, applies a plan by position.

[Note: Positions]
An iteration is a sequence of regions (compiled graphs, optimizer steps), each after a stretch of user code. Positions
count stages from the iteration's start; every stretch of user code counts as one stage of phase "user". A region that
the plan does not expect there (an evaluation pass, a recompiled graph) runs without hints; the next expected one
falls into step again.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from planner import Plan, UnsupportedError
from runtime.block import Block
from runtime.pager import Pager


@dataclass(slots=True, kw_only=True)
class StageRecord:
    """One stage as it ran. `seconds` without waiting for copies."""

    name: str
    phase: str
    seconds: float
    workspace_bytes: int = 0
    read: tuple[Block, ...] = ()
    made: tuple[Block, ...] = ()
    written: tuple[Block, ...] = ()


@dataclass(slots=True, kw_only=True)
class Region:
    """One run of a graph or of an optimizer step, and the user code before it (`stages[0]`, phase "user").

    made: blocks that came into being, in order; the same order in every iteration.
    """

    identity: Hashable
    first: int
    stages: list[StageRecord] = field(default_factory=list)
    made: list[Block] = field(default_factory=list)
    complete: bool = False


@dataclass(slots=True, kw_only=True)
class Iteration:
    """One recorded iteration. `seconds` from the end of the step before to the end of this one's.

    survivors: (region, ordinal) of the blocks that were made in it and still alive when the next iteration's first
    region began, such as gradients that are not set to None before the forward pass.
    """

    number: int
    regions: list[Region] = field(default_factory=list)
    seconds: float = 0.0
    survivors: set[tuple[int, int]] = field(default_factory=set)

    @property
    def signature(self) -> tuple[tuple[Hashable, int], ...]:
        """Equal for iterations that ran the same regions in the same order."""
        return tuple((r.identity, len(r.stages)) for r in self.regions)

    @property
    def stages(self) -> list[StageRecord]:
        return [stage for region in self.regions for stage in region.stages]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """A plan, laid out by position, and the regions it expects.

    regions: (identity, position of its user stage) in order. made_ids: trace ids of what each region makes, in order.
    leave_after, fetch_at: trace ids by position; `fetch_at` counts what belongs to the next iteration from 0 again.
    """

    regions: tuple[tuple[Hashable, int], ...]
    made_ids: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    leave_after: tuple[tuple[int, ...], ...]
    fetch_at: tuple[tuple[int, ...], ...]


def lay_out_plan(plan: Plan, recorded: Iteration, ids: dict[Block, int], sizes: Sequence[int]) -> Hints:
    """Turn a plan for the trace of `recorded` into hints; `ids` are the trace ids of its blocks.

    Raises UnsupportedError for a plan with updates on the host.
    """
    if any(update.where == "host" for update in plan.updates):
        raise UnsupportedError("the plan runs optimizer updates on the host, which training cannot do yet; plan without")
    count = len(recorded.stages)
    leave: list[list[int]] = [[] for _ in range(count)]
    fetch: list[list[int]] = [[] for _ in range(count)]
    for move in plan.moves:  # their order is that of the links' queues
        start = move.after if move.offload is None else move.offload.start
        leave[start % count].append(move.block)
        assert move.prefetch is not None  # only updates on the host consume blocks
        fetch[move.prefetch.start % count].append(move.block)
    return Hints(
        regions=tuple((r.identity, r.first) for r in recorded.regions),
        made_ids=tuple(tuple(ids.get(b, -1) for b in r.made) for r in recorded.regions),
        sizes=tuple(sizes),
        leave_after=tuple(map(tuple, leave)),
        fetch_at=tuple(map(tuple, fetch)),
    )


class Timeline:
    """An `Observer` that records iterations and drives the pager by a plan, if there is one."""

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self._hints: Hints | None = None
        self._by_id: dict[int, Block] = {}
        self._cursor = 0
        self._in_step = False
        self._previous: Iteration | None = None
        self._now = Iteration(number=0)
        self._position = 0
        self._left_user_code = self._began = time.perf_counter()
        self.deviations = 0

    @property
    def position(self) -> int:
        """Position of the stage that runs now, or runs next."""
        return self._position

    def follow(self, hints: Hints | None, blocks: dict[int, Block]) -> None:
        """Use a plan from the next region on; `blocks` are the persistent blocks by their trace id."""
        self._hints, self._by_id, self._cursor = hints, dict(blocks), 0

    # -- Observer

    def region_begins(self, identity: Hashable, stage_count: int) -> None:
        now = time.perf_counter()
        region = Region(identity=identity, first=len(self._now.stages))
        region.stages.append(StageRecord(name="user", phase="user", seconds=now - self._left_user_code))
        self._stage_count = stage_count
        self._now.regions.append(region)
        if len(self._now.regions) == 1 and self._previous is not None:
            self._previous.survivors = {
                (index, ordinal)
                for index, before in enumerate(self._previous.regions)
                for ordinal, block in enumerate(before.made)
                if not block.dead
            }
        self._pager.clock += 1
        self._find_step(identity)

    def _find_step(self, identity: Hashable) -> None:
        """Where the plan expects this region: from the cursor on, else from the beginning; else nowhere."""
        self._in_step = False
        if self._hints is None:
            return
        regions, count = self._hints.regions, len(self._hints.regions)
        for index in (*range(self._cursor, count), *range(min(self._cursor, count))):
            end = regions[index + 1][1] if index + 1 < count else len(self._hints.fetch_at)
            # An optimizer that got more parameters has the same identity, but more stages.
            if regions[index][0] == identity and end - regions[index][1] == self._stage_count + 1:
                self._in_step = True
                self.deviations += index != self._cursor
                self._cursor = index + 1
                self._position = regions[index][1] + 1
                self._leave(self._position - 1)
                return
        self.deviations += 1

    def stage_reached(self) -> Sequence[Block]:
        return self._to_fetch(self._position) if self._in_step else ()

    def _to_fetch(self, position: int) -> list[Block]:
        if self._hints is None:
            return []
        return [self._by_id[i] for i in self._hints.fetch_at[position] if i in self._by_id]

    def _fetch(self, position: int) -> None:
        for block in self._to_fetch(position):
            self._pager.prefetch(block)

    def _leave(self, position: int) -> None:
        for trace_id in self._hints.leave_after[position] if self._hints is not None else ():
            leaving = self._by_id.get(trace_id)
            if leaving is not None:
                self._pager.offload(leaving)

    def stage_ended(
        self,
        *,
        name: str,
        phase: str,
        seconds: float,
        workspace_bytes: int,
        read: Sequence[Block],
        made: Sequence[Block],
        written: Sequence[Block],
        next_uses: dict[Block, int],
    ) -> None:
        region = self._now.regions[-1]
        position = region.first + len(region.stages)
        region.stages.append(
            StageRecord(
                name=name,
                phase=phase,
                seconds=seconds,
                workspace_bytes=workspace_bytes,
                read=tuple(read),
                made=tuple(made),
                written=tuple(written),
            )
        )
        for block in made:
            self._recognise(block, region)
            region.made.append(block)
        self._pager.clock += 1
        mirrored = 2 * (self._stage_count - len(region.stages) + 2)
        for block in (*read, *made):
            block.next_use = self._pager.clock + self._until_next_use(block, position, next_uses, mirrored)
        if self._in_step:
            self._leave(self._position)
            self._position += 1

    def _recognise(self, block: Block, region: Region) -> None:
        """What this block was in the iteration before: its uses then, and its id in the plan's trace."""
        ordinal = len(region.made)
        index = len(self._now.regions) - 1
        before = self._previous.regions[index] if self._previous and index < len(self._previous.regions) else None
        if before is not None and before.identity == region.identity and ordinal < len(before.made):
            block.uses = before.made[ordinal].uses
        if self._in_step and self._hints is not None:
            ids = self._hints.made_ids[self._cursor - 1]
            if ordinal < len(ids) and ids[ordinal] >= 0 and self._hints.sizes[ids[ordinal]] == block.size_bytes:
                block.trace_id = ids[ordinal]
                self._by_id[block.trace_id] = block

    def _until_next_use(self, block: Block, position: int, next_uses: dict[Block, int], mirrored: int) -> int:
        """Stages until the next use: known within the region, else from the last iteration, else as if time ran back."""
        if block in next_uses:
            return next_uses[block]
        if block.uses and self._previous is not None:
            index = bisect_right(block.uses, position)
            count = len(self._previous.stages)
            return block.uses[index] - position if index < len(block.uses) else block.uses[0] + count - position
        return mirrored

    def region_ended(self) -> None:
        self._left_user_code = time.perf_counter()
        region = self._now.regions[-1] if self._now.regions else None
        if region is not None:
            region.complete = len(region.stages) == self._stage_count + 1
        if self._in_step and self._hints is not None and self._cursor < len(self._hints.regions):
            self._fetch(self._hints.regions[self._cursor][1])
        self._in_step = False

    # -- iterations

    def iteration_ends(self) -> Iteration:
        """Close the iteration and begin the next one; returns what was recorded."""
        done = self._now
        now = time.perf_counter()
        done.seconds, self._began, self._left_user_code = now - self._began, now, now
        uses: dict[Block, list[int]] = {}
        for position, stage in enumerate(done.stages):
            for block in dict.fromkeys((*stage.read, *stage.made, *stage.written)):
                uses.setdefault(block, []).append(position)
        for block, positions in uses.items():
            block.uses = tuple(positions)
        self._previous = done
        self._now = Iteration(number=done.number + 1)
        self._pager.iteration = self._now.number
        self._cursor = 0
        if self._hints is not None:
            self._fetch(self._hints.regions[0][1])
        return done
