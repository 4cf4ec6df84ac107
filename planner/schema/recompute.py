"""Recompute groups of a trace: forward stages that can be run again in the backward pass, and what that makes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

from pydantic import FailFast, Field

from planner.schema.models import Bytes, FrozenModel, Id, Ids, Seconds

if TYPE_CHECKING:
    from planner.schema.trace import Block, Stage

__all__ = ["NotRecomputed", "RecomputeGroup", "check_group"]


class RecomputeGroup(FrozenModel):
    """What running the forward stage `stage` again makes: `blocks`, from `reads`, in `duration_seconds`.

    `blocks`: movable blocks that begin to exist in the stage and that user code cannot reach. `reads`: all other blocks that the
    stage reads; also those that die in the forward pass. `workspace_bytes`: the peak of a re-run beyond `reads` and `blocks`: the
    stage's own workspace, and outputs that are not in `blocks`.
    """

    id: Id
    stage: Id
    blocks: Annotated[tuple[Id, ...], FailFast()] = Field(min_length=1)
    reads: Ids
    duration_seconds: Seconds
    workspace_bytes: Bytes = 0


class NotRecomputed(FrozenModel):
    """A forward stage that cannot be run again, and why. For people; plans do not depend on it."""

    stage: Id
    reason: str


def check_group(group: RecomputeGroup, stage: Stage, used: Iterable[Block]) -> None:
    """Raise ValueError if running `stage` again does not make the group's blocks. `used`: all blocks that the stage uses."""
    what = f"recompute group {group.id}"
    if stage.phase != "forward":
        raise ValueError(f"{what} runs stage {stage.id} again, which is of phase {stage.phase!r}; only forward stages can be")
    born: dict[int, Block] = {}
    before: dict[int, Block] = {}
    for block in used:
        (before if block.persistent or block.uses[0] < stage.id else born)[block.id] = block
    for block in before.values():
        if stage.id in block.writes:
            raise ValueError(f"{what}: stage {stage.id} changes block {block.id}, which exists before it; leave the group out")
    for number in group.blocks:
        made = born.get(number)
        if made is None or stage.id not in made.writes or not made.movable or made.user_visible:
            raise ValueError(
                f"{what} cannot make block {number}: that takes a movable activation or buffer that stage {stage.id} writes first"
            )
    if set(group.reads) != before.keys():
        raise ValueError(
            f"{what} reads the blocks {sorted(group.reads)[:20]}, its stage {sorted(before)[:20]}: name exactly these"
        )
    for label, ids in (("blocks", group.blocks), ("reads", group.reads)):
        if len(set(ids)) != len(ids):
            raise ValueError(f"{what} names a block twice in {label}: {list(ids)[:20]}")
