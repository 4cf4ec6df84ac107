"""An observer that is driven as the executor drives it, over a pager that notes what it is asked for."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from planner import Budgets, Move, Offload, Plan, Prefetch
from planner.schema import WaitingTier
from runtime.device import WallMark
from runtime.execution import StageRun
from runtime.paging import Block, Pager
from teraio.following import IterationObserver, StageSchedule
from teraio.profiling import Iteration

from ..virtual import profile_of

FORWARD, BACKWARD, STEP, EVALUATION = "forward", "backward", "optimizer", "evaluation"
COUNTS = {FORWARD: 2, BACKWARD: 2, STEP: 1, EVALUATION: 3}
"""Stages of each region; every region has the user's code before it as one more."""


class NotingPager(Pager):
    """Notes the moves that it is asked for; carries out none."""

    def __init__(self) -> None:
        super().__init__(mover=None, budget_bytes=None)
        self.asked: list[str] = []

    def offload_all(self, leaving: Sequence[tuple[Block, WaitingTier | None]]) -> None:
        self.asked += [f"out {block.name}" for block, _ in leaving]

    def prefetch(self, block: Block) -> None:
        self.asked.append(f"in {block.name}")


class Training:
    """A recorder that is driven as the executor drives it. Each forward stage makes an activation for the backward."""

    def __init__(self) -> None:
        self.pager = NotingPager()
        self.observer = IterationObserver(self.pager)
        self.weight, self._tensor = self.block("weight")
        self.kept: list[torch.Tensor] = []
        self.made: list[Block] = []
        self.fetched: list[tuple[str, list[str]]] = []

    def block(self, name: str) -> tuple[Block, torch.Tensor]:
        tensor = torch.zeros(16)
        return self.pager.block_of(tensor, name=name, kind="activation", user_visible=False), tensor

    def region(self, identity: Hashable, *, stages: int | None = None, fails_at: int | None = None) -> None:
        count = COUNTS[str(identity)] if stages is None else stages
        self.observer.region_begins(identity, count, is_inference=identity == EVALUATION)
        for number in range(count):
            self.run_due(f"{identity} {number}")
            wanted = [block.name for block in self.observer.stage_reached()]
            self.fetched.append((f"{identity} {number}", wanted))
            if number == fails_at:
                break
            self._stage(str(identity), number)
        self.observer.region_ended()

    def run_due(self, stage: str) -> None:
        """Run what has its place before a stage: nothing, in these plans."""
        assert not list(self.observer.reruns_due())

    def _stage(self, identity: str, number: int) -> None:
        read, made = [self.weight], list[Block]()
        if identity == FORWARD:
            block, tensor = self.block(f"activation{number}")
            self.kept.append(tensor)
            self.made.append(block)
            made = [block]
        if identity == BACKWARD and self.made:
            read.append(self.made.pop())
        written = [self.weight] if identity == STEP else []
        run = StageRun(name=f"{identity}/{number}", phase=identity, read=read, made=made, written=written)  # type: ignore[arg-type]
        self.observer.stage_ended(run, WallMark(0.0), WallMark(0.001))
        if identity == BACKWARD and self.kept:
            self.kept.pop()

    def regions(self, *identities: str) -> None:
        for identity in identities:
            self.region(identity)

    def iteration(self, regions: Sequence[str] = (FORWARD, BACKWARD, STEP)) -> Iteration:
        self.regions(*regions)
        return self.observer.iteration_ends()

    def follow(self, schedule: StageSchedule, blocks: dict[int, Block]) -> None:
        self.observer.plan.follow(schedule, blocks)
        self.pager.asked.clear()
        self.fetched.clear()

    def asked(self) -> tuple[dict[str, list[str]], list[str]]:
        """What stages fetched and what else was hinted since the last call."""
        fetched = {stage: names for stage, names in self.fetched if names}
        asked = list(self.pager.asked)
        self.fetched.clear()
        self.pager.asked.clear()
        return fetched, asked


WEIGHT, FIRST, SECOND = 0, 1, 2
"""Trace ids of the weight and the two activations."""


def schedule_of(recorded: Iteration, *moves: Move) -> StageSchedule:
    profile = profile_of([recorded])
    assert [block.name for block in profile.trace.blocks[:3]] == ["weight", "activation0", "activation1"]
    plan = Plan(trace_fingerprint="", policy="by hand", budgets=Budgets(device_bytes=0), moves=moves)
    return StageSchedule.of(profile, plan)


def lay_out(recorded: Iteration) -> StageSchedule:
    """Positions: 0 user, 1-2 forward, 3 user, 4-5 backward, 6 user, 7 step."""
    moves = (
        move(FIRST, after=1, start=2, fetch=4, before=5),
        move(WEIGHT, after=5, start=5, fetch=6, before=7),
        move(WEIGHT, after=7, start=7, fetch=8, before=9),
    )
    return schedule_of(recorded, *moves)


def move(block: int, *, after: int, start: int, fetch: int, before: int) -> Move:
    return Move(
        block=block,
        after=after,
        before=before,
        tier="storage",
        offload=Offload(start=start, free_after=start),
        prefetch=Prefetch(start=fetch, ready_by=before),
    )
