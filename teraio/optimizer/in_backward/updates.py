"""The updates that one run of a backward graph makes between its stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from planner.errors import BudgetError
from runtime.execution import StageRun
from runtime.paging import Block, Pager
from runtime.system import annotate
from teraio.optimizer.capabilities import bytes_of, keeps_masters, states_per_parameter, temporary_bytes
from teraio.optimizer.in_backward.records import Final, UpdateEligibility
from teraio.optimizer.masters import casting_bytes, master_bytes, update_replicas
from teraio.optimizer.replica import Replica, by_group
from teraio.profiling import IterationRecorder

_WORTH_A_STAGE_BYTES = 4 << 20
"""Of parameters, gradients and states: smaller updates wait for those of the stages after, up to this size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A parameter that is updated: by which optimizer, when, and what its update touches besides the gradient."""

    optimizer: Optimizer
    parameter: Tensor
    eligibility: UpdateEligibility
    final: Final
    block: Block
    states: tuple[Block, ...]

    @property
    def size_bytes(self) -> int:
        """Of parameter, gradient and states, estimated from what stays the same in every iteration."""
        size = bytes_of(self.parameter)
        return 2 * size + states_per_parameter(self.optimizer) * (self.master_bytes or size) + self.master_bytes

    @property
    def master_bytes(self) -> int:
        """Of its master copy in fp32, if it has one."""
        return master_bytes(self.parameter) if keeps_masters(self.optimizer) else 0


@dataclass(frozen=True, slots=True)
class UpdateStage:
    """Members (by number) that are updated together when the graph's stage `after` has ended."""

    after: int
    members: tuple[int, ...]


def cut_updates(members: Sequence[Member], largest_bytes: int) -> tuple[UpdateStage, ...]:
    """Stages of one optimizer each, in the order in which gradients become final.

    Of at most `largest_bytes`, but for a parameter that is larger by itself and small ones before it; of at least
    `_WORTH_A_STAGE_BYTES` where gradients of later stages can make it so. 0: one parameter each.
    """
    stages: list[UpdateStage] = []
    for optimizer in dict.fromkeys(member.optimizer for member in members):
        own = [number for number, member in enumerate(members) if member.optimizer is optimizer]
        gathered: list[int] = []
        size = after = 0
        for number in sorted(own, key=lambda number: members[number].final.after):
            member = members[number]
            later = member.final.after > after and size >= _WORTH_A_STAGE_BYTES
            full = size + member.size_bytes > largest_bytes and 2 * size >= largest_bytes
            if gathered and (later or full):
                stages.append(UpdateStage(after, tuple(gathered)))
                gathered, size = [], 0
            gathered.append(number)
            size += member.size_bytes
            after = member.final.after
        stages.append(UpdateStage(after, tuple(gathered)))
    return tuple(sorted(stages, key=lambda stage: stage.after))


class RegionUpdates:
    """Runs the update stages of one run of a graph. no_room is called with the members of one that the budget is too small for:
    these keep their gradients, and the step updates them.
    """

    def __init__(
        self,
        pager: Pager,
        timeline: IterationRecorder,
        name: str,
        members: Sequence[Member],
        stages: Sequence[UpdateStage],
        no_room: Callable[[Sequence[Member], BudgetError], None],
    ) -> None:
        self._pager = pager
        self._timeline = timeline
        self._no_room = no_room
        self._stages: dict[int, list[tuple[str, list[Member]]]] = {}
        for number, stage in enumerate(stages):
            chosen = [members[member] for member in stage.members]
            self._stages.setdefault(stage.after, []).append((f"{name}/update.{number}", chosen))
        self.stage_count = len(stages)

    def after_stage(self, number: int, slots: list[Any]) -> None:
        """Update what is final now, and take the gradients out of `slots`. Blocks while states are fetched."""
        for name, members in self._stages.pop(number, ()):
            self._update(name, members, slots)

    def _update(self, name: str, members: Sequence[Member], slots: list[Any]) -> None:
        optimizer = members[0].optimizer
        gradients = [self._pager.known_block(slots[member.final.slot]) for member in members]
        changed = tuple(dict.fromkeys(block for member in members for block in (member.block, *member.states)))
        read = tuple(dict.fromkeys((*changed, *(block for block in gradients if block is not None))))
        sizes = [(m.parameter.device.type, m.master_bytes or bytes_of(m.parameter)) for m in members]
        workspace_bytes = temporary_bytes(optimizer, sizes) + casting_bytes([m.master_bytes for m in members])
        try:
            self._pager.acquire(read, workspace_bytes, name, then_fetch=self._timeline.stage_reached())
        except BudgetError as error:
            self._no_room(members, error)
            return
        try:
            begin = self._pager.device.mark()
            for member in members:
                member.eligibility.updated = True  # also by an update that fails half-way
                member.parameter.grad = slots[member.final.slot]
            with annotate("update", name):
                update_replicas(optimizer, _replicas(optimizer, members))
            end = self._pager.device.mark()
        finally:
            for member in members:
                member.parameter.grad = slots[member.final.slot] = None
            self._pager.retire(read, changed, last_used=[block for block in gradients if block is not None])
        self._timeline.stage_ended(
            StageRun(
                name=name,
                phase="optimizer",
                begin=begin,
                end=end,
                workspace_bytes=workspace_bytes,
                elements=sum(member.parameter.numel() for member in members),
                read=read,
                made=(),
                written=changed,
            )
        )


def _replicas(optimizer: Optimizer, members: Sequence[Member]) -> list[list[Replica]]:
    """The parameters themselves, by group: an update of these alone."""
    states = optimizer.state
    placed = ((m.eligibility.place[0], Replica(parameter=m.parameter, state=states.get(m.parameter, {}))) for m in members)
    return by_group(optimizer, placed)
