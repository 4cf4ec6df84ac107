"""A plan, laid out by position in the iteration, as the recorder applies it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from planner import Plan
from planner.schema import WaitingTier
from runtime.paging import Block
from teraio.profiling.iteration import Iteration
from teraio.profiling.reruns_by_stage import RerunsByStage


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSchedule:
    """What to offload and to prefetch at each position, see [Note: Positions], and the regions that the plan expects.

    Positions are the plan's: its re-runs count as stages.
    regions: identity of each region and position of its user stage, in order. counts: its number of stages, without re-runs.
    made_ids: for each region the trace ids of the blocks that it makes, in order; -1 for a block that the trace lacks.
    sizes: bytes of each block, by trace id.
    leave_after: for each position the blocks (trace ids) to offload after that stage, and the tier for each.
    fetch_at: for each position the blocks (trace ids) to prefetch. Those of the next iteration are counted from 0 again.
    on_host: positions of the stages whose updates run on the host, in the order of these updates.
    kept: for each region the numbers of its stages that run again later; they count from the first one after the user code.
    reruns: what runs again, and what is dropped.
    """

    regions: tuple[tuple[Hashable, int], ...]
    counts: tuple[int, ...]
    made_ids: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    leave_after: tuple[tuple[tuple[int, WaitingTier], ...], ...]
    fetch_at: tuple[tuple[int, ...], ...]
    on_host: tuple[int, ...] = ()
    kept: tuple[frozenset[int], ...] = ()
    reruns: RerunsByStage


def lay_out_plan(
    plan: Plan, recorded: Iteration, ids: dict[Block, int], sizes: Sequence[int], reruns: RerunsByStage | None = None
) -> StageSchedule:
    """Lay out a plan that was made for the trace of `recorded`.

    ids: the trace ids of its blocks. sizes: bytes, by trace id. reruns: those of the plan; default: none.
    """
    reruns = reruns or RerunsByStage.none(len(recorded.stages))
    count = reruns.count
    leave: list[list[tuple[int, WaitingTier]]] = [[] for _ in range(count)]
    fetch: list[list[int]] = [[] for _ in range(count)]
    for move in plan.moves:  # in this order they enter the queues of the links
        start = move.after if move.offload is None else move.offload.start
        leave[start % count].append((move.block, move.tier))
        if move.prefetch is not None:  # otherwise the block does not come back
            fetch[move.prefetch.start % count].append(move.block)
    updates = updating_stages(recorded)
    return StageSchedule(
        regions=tuple((r.identity, reruns.numbers[r.first]) for r in recorded.regions),
        counts=tuple(len(r.stages) for r in recorded.regions),
        made_ids=tuple(tuple(ids.get(b, -1) for b in r.made) for r in recorded.regions),
        sizes=tuple(sizes),
        leave_after=tuple(map(tuple, leave)),
        fetch_at=tuple(map(tuple, fetch)),
        on_host=tuple(reruns.numbers[updates[update.subgroup]] for update in plan.updates if update.where == "host"),
        kept=tuple(frozenset(n for n in range(len(r.stages) - 1) if r.first + 1 + n in reruns.stages) for r in recorded.regions),
        reruns=reruns,
    )


def updating_stages(recorded: Iteration) -> list[int]:
    """Return the positions of the stages that update parameters. The trace has one subgroup for each, in this order."""
    return [position for position, stage in enumerate(recorded.stages) if stage.elements]
