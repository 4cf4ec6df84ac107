"""The optimizer step without interleaving, for comparison: each subgroup is loaded, updated and written back before the next.

Stages, subgroups, files and engine are those of the interleaved step. `layer_by_layer` makes a plan in which no copy for a
subgroup starts before its turn. As a program, this module is an `examples.worker` whose pager waits for the copies of a subgroup
before those of the next one begin: a plan cannot express that a copy in has to wait for a copy out.
"""

from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

from examples.worker import serve
from planner import Block, Budgets, Move, Offload, Plan, Prefetch, Trace, plan
from planner.schema import Placement, Tier
from runtime.paging import Block as Resident
from runtime.paging import Pager, State
from teraio import training_run


class SubgroupAfterSubgroup(Pager):
    """A pager that begins the copies of an update only when all other copies have ended. Not for a GPU."""

    def acquire(self, blocks: Sequence[Resident], new_bytes: int, what: str, **how: Any) -> None:
        if what.startswith("optimizer/"):
            with self.condition:
                while any(block.state in (State.OFFLOADING, State.PREFETCHING) for block in self.table):
                    self._signal.wait()
        super().acquire(blocks, new_bytes, what, **how)


def layer_by_layer(trace: Trace, budgets: Budgets) -> Plan:
    """Return a plan that prefetches every state when its update begins, and offloads it when the update has ended.

    All other blocks move as the integer program decides, if the states of a subgroup count as workspace of its update and their
    copies as part of its time. But no block is prefetched while another subgroup is updated, or before its own update begins.
    Raises BudgetError, InfeasiblePlanError.
    """
    states = [block for block in trace.blocks if _leaves(block)]
    reduced, numbers = _without(trace, states)
    rest = plan(reduced, budgets)
    known = {small: number for number, small in numbers.items()}
    moves = [_delayed(move.model_copy(update={"block": known[move.block]}), trace) for move in rest.moves]
    moves += _in_turn(states, len(trace.stages))
    return Plan(
        trace_fingerprint=trace.fingerprint,
        policy="layer-by-layer",
        budgets=budgets,
        moves=tuple(moves),
        initial=tuple(_initial(trace, moves)),
        subgroup_bytes=trace.subgroup_bytes,
    )


def _leaves(block: Block) -> bool:
    return block.kind == "optimizer_state" and block.movable and len(block.uses) == 1


def _without(trace: Trace, states: Sequence[Block]) -> tuple[Trace, dict[int, int]]:
    """Return the trace with `states` as workspace of their updates in place of blocks, and new block numbers by old ones."""
    gone = {block.id for block in states}
    kept = [block for block in trace.blocks if block.id not in gone]
    numbers = {block.id: index for index, block in enumerate(kept)}
    size_bytes = [0] * len(trace.stages)
    for block in states:
        size_bytes[block.uses[0]] += block.size_bytes
    ways = [link for link in trace.hardware.links if "storage" in (link.from_tier, link.to_tier)]
    stages = tuple(
        stage.model_copy(
            update={
                "workspace_bytes": stage.workspace_bytes + size,
                "duration_seconds": stage.duration_seconds + (sum(way.seconds(size) for way in ways) if size else 0.0),
            }
        )
        for stage, size in zip(trace.stages, size_bytes, strict=True)
    )
    reduced = Trace.build(
        name=trace.name,
        created_by=trace.created_by,
        hardware=trace.hardware,
        stages=stages,
        blocks=tuple(block.model_copy(update={"id": numbers[block.id]}) for block in kept),
    )
    return reduced, numbers


def _delayed(move: Move, trace: Trace) -> Move:
    """Return the move with a prefetch that begins neither before the update that needs the block nor during other updates."""
    if move.prefetch is None:
        return move
    updates = {stage.id for stage in trace.stages if stage.phase == "optimizer"}
    start, count = move.prefetch.start, len(trace.stages)
    if move.before % count in updates:
        start = move.before
    while start < move.before and start % count in updates:
        start += 1
    ready_by = max(start, move.prefetch.ready_by)
    return move.model_copy(update={"prefetch": Prefetch(start=start, ready_by=ready_by)})


def _in_turn(states: Sequence[Block], count: int) -> Iterator[Move]:
    for block in states:
        (update,) = block.uses
        yield Move(
            block=block.id,
            after=update,
            before=update + count,
            tier="storage",
            offload=Offload(start=update, free_after=update),
            prefetch=Prefetch(start=update + count, ready_by=update + count),
        )


def _initial(trace: Trace, moves: Sequence[Move]) -> Iterator[Placement]:
    count = len(trace.stages)
    away: dict[int, Tier] = {}
    for move in moves:
        if move.prefetch is not None and move.leaves < count <= move.prefetch.start:
            away[move.block] = move.tier
    return (Placement(block=b.id, tier=away.get(b.id, "device")) for b in trace.blocks if b.persistent)


if __name__ == "__main__":
    with patch.object(training_run, "Pager", SubgroupAfterSubgroup):
        serve()
