"""Replay a plan exactly, event by event. Every plan is judged by this replay, which shares no code with the integer program.

[Note: execution semantics] The runtime follows these rules too.

* Stage s is *reached* when stage s − 1 has ended. At that instant these things happen, in this order: dead blocks and the
  workspace of s − 1 are freed; blocks whose move has no offload are dropped; offloads with start s − 1 are queued; prefetches
  with start s are queued (each queue in the order of the plan's moves). Then s waits until it can start.
* s starts when its inputs are resident and its outputs and workspace fit. From the time it is reached, its outputs and workspace
  count as taken whenever a prefetch asks for room: no prefetch takes the room that the next stage needs.
* A link serves its queue strictly in order, one block at a time, latency + size / rate each. A prefetch reserves its memory when
  the link begins it. At the head of the queue it waits for room, and for the block's own copy out.
* A block that is copied out counts until the copy has ended. A copy keeps its place in the lower tier until the block dies; the
  copy of a persistent block keeps it for good. A block may die while its copy out is queued or under way. It then counts and
  keeps its place until the copy has ended, and a stage that makes the block anew waits for that.
* Links that share a rate divide it max-min fairly while more than one of them is past its latency.
* Updates on the host: [Note: updates on the host] in `planner.problem.host_updates`. At the head of its queue, the copy in of a
  parameter waits for the update too.
* Re-runs of recompute groups are stages: [Note: recomputation] in `planner.problem.recompute`.
* User code: [Note: user code] in `planner.problem.host_updates`. A stage of phase "user" waits for updates on the host and for
  copies of blocks that user code can reach, and holds back copies in of these blocks.
* The iteration is cyclic. Times are those of the steady state: iterations are replayed until one ends as it began. After 32 the
  last one counts (a link may lag behind only slightly in each, or two states may alternate).
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Literal

from planner.errors import InfeasiblePlanError, PlanError
from planner.problem import spelled_out
from planner.schema import Plan, Trace, WaitingTier, short_fingerprint
from planner.simulator.program import NOWHERE, compile_program
from planner.simulator.resources import Channel, HostProcessor, Links, QueuedTransfer, TierUsage
from planner.simulator.timeline import HostUpdate, MemoryChange, StageTimes, Standing, Timeline, Transfer, same

_MAX_ITERATIONS = 32
_HOST: frozenset[WaitingTier] = frozenset({"host"})


def simulate(trace: Trace, plan: Plan) -> Timeline:
    """Replay `plan` on `trace` by the rules of [Note: execution semantics].

    Stages are those of `recomputed(trace, plan.recompute)`; blocks that are made anew have the ids of `trace`.

    Raises PlanError when the plan was made for another trace, and when a group cannot run again where the plan says. Raises
    InfeasiblePlanError, naming stage and block, when a move or an update does not fit the trace, a budget is exceeded, the
    iteration is not cyclic, or stages and links wait for each other for ever.
    """
    if plan.trace_fingerprint != trace.fingerprint:
        raise PlanError(
            f"the plan was made for the trace with fingerprint {short_fingerprint(plan.trace_fingerprint)}, that of the trace "
            f"{trace.name!r} is {short_fingerprint(trace.fingerprint)}; make a plan from this trace: teraio plan"
        )
    source, laid_out = spelled_out(trace, plan)
    replay = _Replay(source, laid_out)
    began = replay.standing()
    for _ in range(_MAX_ITERATIONS):
        timeline = replay.one_iteration()
        before, began = began, replay.standing()
        if same(before, began, timeline.iteration_seconds):
            break
    if not plan.recompute:
        return timeline
    # The replay numbers blocks as in the iteration with re-runs; the plan and the caller know those of `trace`.
    named = tuple(transfer._replace(block=plan.moves[transfer.move].block) for transfer in timeline.transfers)
    return replace(timeline, transfers=named)


class _Replay:
    """State of one replay. A block is on the device, leaving, coming or away."""

    def __init__(self, trace: Trace, plan: Plan) -> None:
        self.plan, self.program, self.links = plan, compile_program(trace, plan), Links(trace.hardware)
        self.layout, self.channels = self.program.layout, self.links.channels
        self.source = trace  # with the sizes of what only the host's updates use
        self.trace = self.layout.trace
        self.device_budget = plan.budgets.device_bytes
        self.state: list[Literal["device", "leaving", "coming", "away"]] = ["away"] * len(trace.blocks)
        self.copies: list[frozenset[WaitingTier]] = [NOWHERE] * len(trace.blocks)  # tiers with a valid copy
        self.dead: set[int] = set()  # blocks that died while they were leaving
        self.used = self.peak = 0  # bytes on the device
        self.now = 0.0
        self.iteration_began = 0.0
        self.stage = 0  # the stage that is reached or runs
        self.reached_at = 0.0
        self.waiting_bytes = 0  # outputs and workspace of a stage that is reached and has not started
        self.processor = HostProcessor(trace, self.program)
        self.tier_usage = TierUsage(trace, plan.budgets, self.program.persistent_places)
        self.visible_copies = 0  # copies that user code waits for: queued outwards, under way inwards
        self.times: list[StageTimes] = []
        self.transfers: list[Transfer] = []
        self.updated: list[HostUpdate] = []
        self.moved: dict[str, int] = {}
        self.memory: list[MemoryChange] = []
        self._place_persistent()

    def _place_persistent(self) -> None:
        """Put every persistent block into the tier where the plan says that it waits."""
        for block in self.trace.blocks:
            if not block.persistent:
                continue
            if self.program.initial[block.id] == "device":
                self.state[block.id] = "device"
                self.used += block.size_bytes
            # Assume that copies made in the iteration before are valid; later iterations check it.
            self.copies[block.id] = self.program.persistent_places[block.id]
        if self.used > self.device_budget:
            raise InfeasiblePlanError(
                f"{self.used:,} bytes are on the device when the iteration begins; the budget is "
                f"{self.device_budget:,} bytes: move more blocks over the iteration's end",
                stage=self.trace.stages[0].name,
            )
        self.peak = self.used

    def standing(self) -> Standing:
        """What the next iteration depends on, between iterations: if it ends as it began, so will all others."""
        in_order = sorted(self.channels.values(), key=lambda channel: channel.order if channel.active else inf)
        links = [channel.standing(self.now) for channel in in_order]
        updates, seconds = self.processor.standing(self.now)
        blocks = (list(self.state), list(self.copies), set(self.dead), self.tier_usage.held())
        return (*blocks, updates, [each for each, _ in links]), (*seconds, *(time for _, times in links for time in times))

    def one_iteration(self) -> Timeline:
        """Replay one iteration. Its times count from the end of the iteration before."""
        self._reach(0)
        # Only now, so that the copies that begin at this instant are part of what the iteration finds on the device.
        self.times, self.transfers, self.updated, self.moved = [], [], [], {}
        self.iteration_began = self.reached_at = self.now
        self.memory = self._held()
        for stage in range(len(self.trace.stages)):
            if stage:
                self._reach(stage)
            self._run(stage)
        return Timeline(
            iteration_seconds=self.now - self.iteration_began,
            stages=tuple(self.times),
            transfers=tuple(self.transfers),
            updates=tuple(self.updated),
            memory=tuple(self.memory),
            peak_bytes={"device": self.peak, **self.tier_usage.peak_bytes},
            moved_bytes=dict(self.moved),
            storage_written_bytes=sum(size for name, size in self.moved.items() if name.endswith("->storage")),
        )

    def _run(self, stage: int) -> None:
        """Wait until the stage can start, and run it. Meanwhile links and processor go on."""
        while not self._can_start(stage):
            if not self._proceed(inf):
                raise self._stuck()
        start = self.now
        for block in self.layout.born[stage]:
            self._change_device(self.trace.blocks[block].size_bytes, block)
        self._change_device(self.trace.stages[stage].workspace_bytes, None)
        self.waiting_bytes = 0
        end = start + self.trace.stages[stage].duration_seconds
        while self._proceed(end):
            pass
        self.now = end
        self._end_stage(stage, start)

    def _held(self) -> list[MemoryChange]:
        """What the tiers hold now, as the changes that an iteration begins with."""
        found: list[MemoryChange] = []
        for block, below in zip(self.source.blocks, self.tier_usage.held(), strict=True):
            if self.state[block.id] != "away" and (size := self.trace.blocks[block.id].size_bytes):
                found.append((0.0, "device", block.id, size))
            if below and block.size_bytes:
                found += [(0.0, tier, block.id, block.size_bytes) for tier in below]
        return found

    def _reach(self, stage: int) -> None:
        self.stage, self.reached_at = stage, self.now
        self.waiting_bytes = self.layout.need_bytes[stage]
        for subgroup in self.program.updates[stage]:
            self.processor.add(subgroup, self.now)
        for index in self.program.prefetches[stage]:
            self._queue(index, inward=True)
        self._dispatch()

    def _can_start(self, stage: int) -> bool:
        if self.used + self.waiting_bytes > self.device_budget:
            return False
        if stage in self.layout.user_stages and (self.visible_copies or not self.processor.idle):
            return False
        if self.dead and not self.dead.isdisjoint(self.layout.born[stage]):
            return False
        for block in self.layout.inputs[stage]:  # a loop: it is asked at every event
            if self.state[block] != "device":
                return False
        return True

    def _held_back(self, block: int) -> bool:
        """Whether user code keeps a copy in of the block from beginning, see [Note: user code]."""
        if block not in self.layout.visible or self.stage not in self.layout.user_stages:
            return False
        return all(self.state[other] in ("device", "coming") for other in self.layout.inputs[self.stage])

    def _end_stage(self, stage: int, start: float) -> None:
        """Do everything that happens at the end of a stage that began at `start` and ends now."""
        self.times.append(
            StageTimes(
                reached_seconds=self.reached_at - self.iteration_began,
                start_seconds=start - self.iteration_began,
                end_seconds=self.now - self.iteration_began,
            )
        )
        for block in self.layout.born[stage]:
            self.state[block] = "device"
        for block in self.layout.written[stage]:
            self.copies[block] = NOWHERE
        self._change_device(-self.trace.stages[stage].workspace_bytes, None)
        for block in self.layout.dying[stage]:
            self._die(block)
        for index in self.program.drops[stage]:
            self._drop(index)
        # They begin when the next stage has been reached, since only then its need for room is known.
        for index in self.program.offloads[stage]:
            self._queue(index, inward=False)

    def _die(self, block: int) -> None:
        if self.state[block] == "leaving":
            self.dead.add(block)
            return
        if self.state[block] == "device":
            self._change_device(-self.trace.blocks[block].size_bytes, block)
        self.state[block] = "away"
        for tier in self.tier_usage.give_back(block):
            self._changed_below(tier, block, -self.source.blocks[block].size_bytes)
        self.copies[block] = NOWHERE

    def _drop(self, index: int) -> None:
        move = self.plan.moves[index]
        block = self.trace.blocks[move.block]
        if move.tier not in self.copies[block.id] and block.id not in self.layout.read_only:
            raise InfeasiblePlanError(
                f"block {block.name!r} is dropped after stage {self.trace.stages[move.after].name!r} "
                f"although no valid copy waits in the {move.tier} tier: give the move an offload",
                stage=self.trace.stages[move.after].name,
                block=block.name,
            )
        self.state[block.id] = "away"
        self._change_device(-block.size_bytes, block.id)
        if index in self.program.awaiting:  # it cannot come back before the update has written it
            self.processor.stale.add(block.id)

    def _queue(self, index: int, *, inward: bool) -> None:
        move = self.plan.moves[index]
        job = QueuedTransfer(
            move=index,
            block=move.block,
            size=self.trace.blocks[move.block].size_bytes,
            inward=inward,
            tier=move.tier,
            queued=self.now,
        )
        name = f"{move.tier}->device" if inward else f"device->{move.tier}"
        self.channels[name].queue.append(job)
        if not inward:
            self.state[move.block] = "leaving"
            self.visible_copies += move.block in self.layout.visible

    def _dispatch(self) -> None:
        """Let the host's processor, and every idle link, begin the head of its queue if it can."""
        self.processor.begin(self.now)
        for channel in self.channels.values():
            if channel.active is not None or not channel.queue:
                continue
            job = channel.queue[0]
            if job.inward:
                if self.state[job.block] != "away" or job.block in self.processor.stale or self._held_back(job.block):
                    continue
                if self.used + self.waiting_bytes + job.size > self.device_budget:
                    continue
                self._change_device(job.size, job.block)
                self.state[job.block] = "coming"
                self.visible_copies += job.block in self.layout.visible
            elif self.tier_usage.take(job.block, job.tier, stage=self.stage):
                self._changed_below(job.tier, job.block, job.size)
            self.links.begin(channel, self.now)

    def _proceed(self, limit: float) -> bool:
        """Go on to the next event of a link or of the host's processor. Return False if there is none up to `limit`."""
        channel = self.links.next()
        if channel is not None and channel.event <= self.processor.event:
            if channel.event > limit:
                return False
            self.now = channel.event
            job = self.links.proceed(channel)
            if job is not None:
                self._end_transfer(channel, job)
            return True
        if self.processor.event > limit or self.processor.event == inf:
            return False
        self.now = self.processor.event
        update = self.processor.end(self.iteration_began)
        for block in self.program.parameters[update.subgroup]:
            self.copies[block] = _HOST
        self.updated.append(update)
        self._dispatch()
        return True

    def _end_transfer(self, channel: Channel, job: QueuedTransfer) -> None:
        """End the transfer that ends now."""
        name = channel.link.name
        self.moved[name] = self.moved.get(name, 0) + job.size
        self.visible_copies -= job.block in self.layout.visible
        if job.inward:
            self.state[job.block] = "device"
        else:
            self.state[job.block] = "away"
            self._change_device(-job.size, job.block)
            self.copies[job.block] |= {job.tier}
            if self.plan.moves[job.move].prefetch is None:
                self.processor.landed.add(job.block)
            if job.block in self.dead:
                self.dead.discard(job.block)
                self._die(job.block)
        began = self.iteration_began
        self.transfers.append(
            Transfer(
                move=job.move,
                block=job.block,
                link=name,
                queued_seconds=job.queued - began,
                start_seconds=channel.began - began,
                end_seconds=self.now - began,
            )
        )
        self._dispatch()

    def _stuck(self) -> InfeasiblePlanError:
        """Return the error of a stage that waits for ever."""
        missing = [block for block in self.layout.inputs[self.stage] if self.state[block] != "device"]
        name = self.trace.stages[self.stage].name
        waits = f"for block {self.trace.blocks[missing[0]].name!r}" if missing else f"for {self.waiting_bytes:,} bytes"
        return InfeasiblePlanError(
            f"stage {name!r} waits for ever {waits}: {self.used:,} of {self.device_budget:,} "
            "device bytes are taken and no transfer is under way: move more blocks, or prefetch later",
            stage=name,
            block=self.trace.blocks[missing[0]].name if missing else None,
        )

    def _change_device(self, size: int, block: int | None) -> None:
        """Take room on the device for a block, or for workspace (None); with a negative size, free it."""
        self.used += size
        if self.used > self.peak:
            self.peak = self.used
        if size:
            self.memory.append((self.now - self.iteration_began, "device", block, size))

    def _changed_below(self, tier: WaitingTier, block: int, size: int) -> None:
        if size:
            self.memory.append((self.now - self.iteration_began, tier, block, size))
