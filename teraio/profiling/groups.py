"""Which stages of a recorded iteration can run again, as the recompute groups of its trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import planner
from runtime.paging import Block
from teraio.profiling.iteration import StageRecord


def recompute_groups(
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
        wanted = [ids[b] for b in stage.made if _can_be_dropped(b) and _for_backward(blocks[ids[b]], position, stages)]
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


def _can_be_dropped(block: Block) -> bool:
    return block.span is not None and not block.user_visible and block.kind == "activation"


def _for_backward(block: planner.Block, made_in: int, stages: Sequence[StageRecord]) -> bool:
    if block.persistent or block.dies_after is not None or block.uses[0] != made_in:
        return False
    return any(stages[use].phase == "backward" for use in block.uses)
