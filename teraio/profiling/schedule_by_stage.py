"""A plan as the timeline applies it: by position in the iteration."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from planner import Plan
from planner.schema import WaitingTier
from runtime.paging import Block
from teraio.profiling.iteration import Iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSchedule:
    """A plan, laid out by position, and the regions it expects.

    regions: (identity, position of its user stage) in order. made_ids: trace ids of what each region makes, in order.
    leave_after: trace ids and tiers by position. fetch_at: trace ids by position; what belongs to the next iteration
    counts from 0 again. on_host: positions of the stages whose updates run on the host, in the order in which they do.
    """

    regions: tuple[tuple[Hashable, int], ...]
    made_ids: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    leave_after: tuple[tuple[tuple[int, WaitingTier], ...], ...]
    fetch_at: tuple[tuple[int, ...], ...]
    on_host: tuple[int, ...] = ()


def lay_out_plan(plan: Plan, recorded: Iteration, ids: dict[Block, int], sizes: Sequence[int]) -> StageSchedule:
    """Turn a plan for the trace of `recorded` into hints; `ids` are the trace ids of its blocks."""
    count = len(recorded.stages)
    leave: list[list[tuple[int, WaitingTier]]] = [[] for _ in range(count)]
    fetch: list[list[int]] = [[] for _ in range(count)]
    for move in plan.moves:  # their order is that of the links' queues
        start = move.after if move.offload is None else move.offload.start
        leave[start % count].append((move.block, move.tier))
        if move.prefetch is not None:  # else it does not come back
            fetch[move.prefetch.start % count].append(move.block)
    updates = updating_stages(recorded)
    return StageSchedule(
        regions=tuple((r.identity, r.first) for r in recorded.regions),
        made_ids=tuple(tuple(ids.get(b, -1) for b in r.made) for r in recorded.regions),
        sizes=tuple(sizes),
        leave_after=tuple(map(tuple, leave)),
        fetch_at=tuple(map(tuple, fetch)),
        on_host=tuple(updates[update.subgroup] for update in plan.updates if update.where == "host"),
    )


def updating_stages(recorded: Iteration) -> list[int]:
    """Positions of the stages that update something; the trace has one subgroup for each, in this order."""
    return [position for position, stage in enumerate(recorded.stages) if stage.elements]
