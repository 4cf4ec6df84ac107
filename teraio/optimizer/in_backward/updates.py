"""The update stages that run between the stages of a backward graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from planner.errors import BudgetError
from runtime.execution import StageRun
from runtime.paging import Block, Pager
from runtime.system import annotate
from teraio.following import IterationObserver
from teraio.optimizer.arithmetic import Replica, casting_bytes, update_replicas
from teraio.optimizer.facts import OptimizerFacts, bytes_of
from teraio.optimizer.in_backward.watch import FinalGradient, UpdateEligibility

MIN_STAGE_BYTES = 4 << 20
"""Parameters, gradients and states of an update stage. Smaller updates wait for those of later stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A parameter that is updated: by which optimizer, after which stage, and the blocks besides the gradient."""

    facts: OptimizerFacts
    parameter: Tensor
    eligibility: UpdateEligibility
    final: FinalGradient
    block: Block
    states: tuple[Block, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of parameter, gradient and states, estimated from what is the same in every iteration."""
        return self.facts.trained_bytes(self.parameter)


@dataclass(frozen=True, slots=True)
class UpdateStage:
    """Members, by number, that are updated together when stage `after` of the graph has ended."""

    after: int
    members: tuple[int, ...]


def cut_updates(members: Sequence[Member], largest_bytes: int, *, min_bytes: int = MIN_STAGE_BYTES) -> tuple[UpdateStage, ...]:
    """Return update stages of one optimizer each, in the order in which gradients become final.

    largest_bytes: of a stage; a larger one has one large parameter, and small ones before it. 0: one parameter each.
    min_bytes: of a stage, where waiting for gradients of later stages can make it so large.
    """
    stages: list[UpdateStage] = []
    for facts in dict.fromkeys(member.facts for member in members):
        own = [number for number, member in enumerate(members) if member.facts is facts]
        gathered: list[int] = []
        size = after = 0
        for number in sorted(own, key=lambda number: members[number].final.after):
            member = members[number]
            later = member.final.after > after and size >= min_bytes
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
    """Runs the update stages of one run of a graph.

    no_room: called with the members of a stage that does not fit in the budget, and the error. They keep their gradients, and the
    optimizer step updates them.
    """

    def __init__(
        self,
        pager: Pager,
        recorder: IterationObserver,
        name: str,
        members: Sequence[Member],
        stages: Sequence[UpdateStage],
        no_room: Callable[[Sequence[Member], BudgetError], None],
    ) -> None:
        self._pager = pager
        self._recorder = recorder
        self._no_room = no_room
        self._stages: dict[int, list[tuple[str, list[Member]]]] = {}
        for number, stage in enumerate(stages):
            chosen = [members[member] for member in stage.members]
            self._stages.setdefault(stage.after, []).append((f"{name}/update.{number}", chosen))
        self.stage_count = len(stages)

    def after_stage(self, number: int, slots: list[Any]) -> None:
        """Update the parameters whose gradients are final now, and take these out of `slots`. Waits for states."""
        for name, members in self._stages.pop(number, ()):
            self._update(name, members, slots)

    def _update(self, name: str, members: Sequence[Member], slots: list[Any]) -> None:
        facts = members[0].facts
        gradients = [self._pager.known_block(slots[member.final.slot]) for member in members]
        changed = tuple(dict.fromkeys(block for member in members for block in (member.block, *member.states)))
        read = tuple(dict.fromkeys((*changed, *(block for block in gradients if block is not None))))
        masters = [facts.master_bytes(m.parameter) for m in members]
        sizes = [(m.parameter.device.type, own or bytes_of(m.parameter)) for m, own in zip(members, masters, strict=True)]
        workspace_bytes = facts.temporary_bytes(sizes) + casting_bytes(masters)
        # Now, since memory may run out below: what lets go of the gradients must not need any.
        used_up, again = [block for block in gradients if block is not None], iter(members)
        try:
            self._pager.acquire(read, workspace_bytes, name, then_fetch=self._recorder.stage_reached())
        except BudgetError as error:
            self._no_room(members, error)
            return
        try:
            begin = self._recorder.mark()
            for member in members:
                member.eligibility.updated = True  # also if the update fails half-way
                member.parameter.grad = slots[member.final.slot]
            with annotate("update", name):
                update_replicas(facts, [_itself(member) for member in members])
            end = self._recorder.mark()
        finally:
            for member in again:
                member.parameter.grad = slots[member.final.slot] = None
            self._pager.retire(read, changed, last_used=used_up)
        self._recorder.stage_ended(
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


def _itself(member: Member) -> Replica:
    """Return the parameter as its own replica, for an update of some parameters alone."""
    state = member.facts.optimizer.state.get(member.parameter, {})
    return Replica(group=member.eligibility.group, parameter=member.parameter, state=state)
