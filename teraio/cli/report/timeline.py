"""The iteration of a plan over time, as the simulator replays it: stages, copies, updates, memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import planner
from planner import Plan, Trace
from planner.problem import live_bytes
from planner.simulator import MemoryChange, Timeline, Transfer
from teraio.cli.output import Data, format_bytes
from teraio.cli.plan_summary import summarise_moves

_KINDS = ("parameter", "gradient", "optimizer_state", "activation", "buffer", "workspace")
"""From the bottom of the stack to its top."""


def timeline_of(plan: Plan, trace: Trace) -> Data:
    """Replay the plan. Raises PlanError if it does not belong to the trace, InfeasiblePlanError if it cannot be carried out.

    All times are seconds from the begin of an iteration of the steady state.
    `stages`: each waits from `reached` to `start`; `waits_for` is what ended then. `copies`: one that began in the iteration
    before has a negative `start`; `why` it is made. `updates`: those on the host's processor.
    `memory`: what is on the device; each of `points` is the time and then the bytes of each of `kinds` from then on.
    `unplanned`: the same for an iteration in which nothing ever leaves the device.
    """
    replayed = planner.simulate(trace, plan)
    derived = planner.recomputed(trace, plan.recompute)
    moves = summarise_moves(plan, derived)
    ended: dict[float, list[str]] = {}
    for transfer in replayed.transfers:
        ended.setdefault(transfer.end_seconds, []).append(f"{transfer.link} {trace.blocks[transfer.block].name}")
    for update in replayed.updates:
        ended.setdefault(update.end_seconds, []).append(f"update of subgroup {update.subgroup} on the host")
    keep_all = Plan(
        trace_fingerprint=trace.fingerprint,
        policy="nothing moves",
        budgets=planner.Budgets(device_bytes=max(live_bytes(trace))),
    )
    return {
        "seconds": replayed.iteration_seconds,
        "budget_bytes": plan.budgets.device_bytes,
        "links": [link.name for link in trace.hardware.links],
        "stages": [
            {
                "name": stage.name,
                "phase": stage.phase,
                "reached": times.reached_seconds,
                "start": times.start_seconds,
                "end": times.end_seconds,
                "waits_for": "; ".join(ended.get(times.start_seconds, ())) if times.stall_seconds > 0 else "",
            }
            for stage, times in zip(derived.stages, replayed.stages, strict=True)
        ],
        "copies": [_copy(transfer, moves[transfer.move], trace) for transfer in replayed.transfers],
        "updates": [
            {
                "subgroup": update.subgroup,
                "name": trace.stages[trace.subgroups[update.subgroup].stage].name,
                "start": update.start_seconds,
                "end": update.end_seconds,
            }
            for update in replayed.updates
        ],
        "memory": _memory(replayed),
        "unplanned": _memory(planner.simulate(trace, keep_all)),
    }


def _copy(transfer: Transfer, move: Data, trace: Trace) -> Data:
    block = trace.blocks[transfer.block]
    return {
        "link": transfer.link,
        "block": transfer.block,
        "name": block.name,
        "kind": block.kind,
        "size_bytes": block.size_bytes,
        "queued": transfer.queued_seconds,
        "start": transfer.start_seconds,
        "end": transfer.end_seconds,
        "why": _why(move),
    }


def _why(move: Data) -> str:
    """Say between which uses the block is away, and which stage needs its room."""
    away = f"away after {move['after_name']}, until {move['before_name']}"
    if move["host_update"] is not None:
        return f"{away}; subgroup {move['host_update']} is updated on the host"
    if move["relieved_name"] is None:
        return f"{away}; no stage would exceed the budget otherwise"
    excess = format_bytes(move["excess_bytes"])
    return f"{away}; if nothing left, {move['relieved_name']} would exceed the budget by {excess}"


def _memory(timeline: Timeline) -> Data:
    present = {kind for _, kind, _ in timeline.memory}
    kinds = [kind for kind in _KINDS if kind in present]
    return {"kinds": kinds, "seconds": timeline.iteration_seconds, "points": list(_points(timeline.memory, kinds))}


def _points(changes: Sequence[MemoryChange], kinds: Sequence[str]) -> Iterable[list[float]]:
    """Yield the bytes of each kind after all changes of an instant."""
    held: dict[str, int] = dict.fromkeys(kinds, 0)
    for number, (seconds, kind, size) in enumerate(changes):
        held[kind] += size
        if number + 1 == len(changes) or changes[number + 1][0] > seconds:
            yield [seconds, *held.values()]
