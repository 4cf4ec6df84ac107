"""The order in which stages run: records every iteration, knows when blocks are needed next, applies a plan by position.

[Note: Positions]
An iteration is a sequence of regions (compiled graphs, optimizer steps), each after a stretch of user code. Positions
count stages from the iteration's start; every stretch of user code counts as one stage of phase "user". A region that
the plan does not expect there (an evaluation pass, a recompiled graph) runs without hints; the next expected one
falls into step again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence

from runtime.device import Mark
from runtime.execution import StageRun
from runtime.paging import Block, Pager
from teraio.profiling.iteration import Iteration, Region, StageRecord
from teraio.profiling.schedule_by_stage import StageSchedule


class Timeline:
    """An `Observer` that records iterations and drives the pager by a plan, if there is one."""

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self._hints: StageSchedule | None = None
        self._by_id: dict[int, Block] = {}
        self._cursor = 0
        self._in_step = False
        self._previous: Iteration | None = None
        self._now = Iteration(number=0)
        self._position = 0
        self._device = pager.device
        self._left_user_code = self._began = self._last_end = self._device.mark()
        self._waited_until_user_code = self._waited_before = self._host_waited()
        self.deviations = 0

    def _host_waited(self) -> float:
        """Seconds in which the host waited and the device did nothing, so far: a device that works by itself goes on."""
        return 0.0 if self._device.asynchronous else self._pager.waited_seconds

    @property
    def position(self) -> int:
        """Position of the stage that runs now, or runs next."""
        return self._position

    @property
    def iteration_number(self) -> int:
        """Of the iteration that is under way."""
        return self._now.number

    @property
    def in_step(self) -> bool:
        """Whether the region that runs is one that a plan has hints for."""
        return self._in_step

    @property
    def subgroups_on_host(self) -> tuple[int, ...]:
        """Of the optimizer step that has just begun: numbers of the stages whose updates the plan wants on the host, in order."""
        if not self._in_step or self._hints is None:
            return ()
        numbers = (position - self._position for position in self._hints.on_host)
        return tuple(number for number in numbers if 0 <= number < self._stage_count)

    def updated_on_host(self, number: int, seconds: float) -> None:
        """Stage `number` of the optimizer step that runs was an update on the host, and took so long there."""
        record = self._now.regions[-1].stages[number + 1]
        record.host_seconds, record.on_host = seconds, True

    def updated_later(self, number: int, begin: Mark, end: Mark) -> None:
        """Stage `number` of the optimizer step that runs was not updated on the host after all, but here, after the others."""
        self._now.untimed.append((self._now.regions[-1].stages[number + 1], begin, end))
        self._device_worked(begin, end)

    def _device_worked(self, begin: Mark, end: Mark) -> None:
        if self._device.asynchronous:  # the host does not wait, the device does
            self._now.gaps.append((self._last_end, begin))
            self._last_end = end

    def replace(self, before: Block, after: Block) -> None:
        """`after` has taken the place of `before`, which is gone: what is known and planned of the one holds for the other."""
        after.uses = before.uses
        if self._by_id.get(before.trace_id) is before and before.size_bytes == after.size_bytes:
            after.trace_id = before.trace_id
            self._by_id[after.trace_id] = after

    def follow(self, hints: StageSchedule | None, blocks: dict[int, Block]) -> None:
        """Use a plan from the next region on; `blocks` are the persistent blocks by their trace id."""
        self._hints, self._by_id, self._cursor = hints, dict(blocks), 0
        for trace_id, block in blocks.items():
            block.trace_id = trace_id

    def change(self, hints: StageSchedule, *, due: Sequence[int]) -> None:
        """Between two iterations: other hints for the same blocks.

        due: trace ids of what the coming iteration needs and should have been asked for by now.
        """
        self._hints, self._cursor = hints, 0
        for block in [self._by_id[i] for i in due if i in self._by_id]:
            self._pager.prefetch(block)

    # -- Observer

    def region_begins(self, identity: Hashable, stage_count: int) -> None:
        region = Region(identity=identity, first=len(self._now.stages))
        waited = self._host_waited() - self._waited_until_user_code  # at the end of the region before
        user = StageRecord(name="user", phase="user", seconds=-waited)
        self._last_end = self._device.mark()
        self._now.untimed.append((user, self._left_user_code, self._last_end))
        region.stages.append(user)
        self._pager.take_late()  # of a stage that failed
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
        for trace_id, tier in self._hints.leave_after[position] if self._hints is not None else ():
            leaving = self._by_id.get(trace_id)
            if leaving is not None:
                self._pager.offload(leaving, tier)

    def stage_ended(self, run: StageRun) -> None:
        region = self._now.regions[-1]
        position = region.first + len(region.stages)
        record = StageRecord(
            name=run.name,
            phase=run.phase,
            workspace_bytes=run.workspace_bytes,
            elements=run.elements,
            host_seconds=run.host_seconds,
            read=tuple(run.read),
            made=tuple(run.made),
            written=tuple(run.written),
            late=tuple((b.trace_id, t) for b, t in self._pager.take_late() if self._by_id.get(b.trace_id) is b),
        )
        self._now.untimed.append((record, run.begin, run.end))
        self._device_worked(run.begin, run.end)
        region.stages.append(record)
        for block in run.made:
            self._recognise(block, region)
            region.made.append(block)
        self._pager.clock += 1
        mirrored = 2 * (self._stage_count - len(region.stages) + 2)
        for block in (*run.read, *run.made):
            block.next_use = self._pager.clock + self._until_next_use(block, position, run.next_uses, mirrored)
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

    def _until_next_use(self, block: Block, position: int, next_uses: Mapping[Block, int], mirrored: int) -> int:
        """Stages until the next use: known within the region, else from the last iteration, else as if time ran back."""
        if block in next_uses:
            return next_uses[block]
        if block.uses and self._previous is not None:
            index = bisect_right(block.uses, position)
            count = len(self._previous.stages)
            return block.uses[index] - position if index < len(block.uses) else block.uses[0] + count - position
        return mirrored

    def region_ended(self) -> None:
        self._left_user_code = self._device.mark()
        self._waited_until_user_code = self._host_waited()
        region = self._now.regions[-1] if self._now.regions else None
        if region is not None:
            region.complete = len(region.stages) == self._stage_count + 1
        if self._in_step and self._hints is not None and self._cursor < len(self._hints.regions):
            self._fetch(self._hints.regions[self._cursor][1])
        self._in_step = False

    # -- iterations

    def iteration_ends(self) -> Iteration:
        """Close the iteration and begin the next one; returns what was recorded, without times if the device still works."""
        done = self._now
        now = self._device.mark()
        done.untimed.append((done, self._began, now))
        self._began = self._left_user_code = now
        if not self._device.asynchronous:
            done.read_times()
        waited = self._host_waited()
        done.waited_seconds, self._waited_before, self._waited_until_user_code = waited - self._waited_before, waited, waited
        uses: dict[Block, list[int]] = {}
        for position, stage in enumerate(done.stages):
            for block in dict.fromkeys((*stage.read, *stage.made, *stage.written)):
                uses.setdefault(block, []).append(position)
        for block, positions in uses.items():
            block.uses = tuple(positions)
        done.held = frozenset(block for block in uses if not block.dead)
        self._previous = done
        self._now = Iteration(number=done.number + 1)
        self._pager.iteration = self._now.number
        self._cursor = 0
        if self._hints is not None:
            self._fetch(self._hints.regions[0][1])
        return done
