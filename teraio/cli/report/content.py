"""All that a report tells, as data: the page shows exactly this, and `--json` prints it."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import planner
from planner import Plan, Trace
from planner.errors import FileFormatError
from planner.problem import live_bytes
from planner.simulator import MemoryChange, Timeline, Transfer
from teraio.cli.lengths import lengths_of_plan
from teraio.cli.output import Data, format_bytes
from teraio.cli.plan_summary import summarise_moves, summarise_plan
from teraio.cli.trace_summary import block_summaries, idlest_blocks, tiles_of
from teraio.watching import IterationStats, read_iterations

_ROWS = 12  # stalls and idle blocks of which a report has the first ones


def report_of(
    plan: Plan, trace: Trace | None, *, sweep: Data | None = None, comparison: Data | None = None, measured: Data | None = None
) -> Data:
    """Return the report of a plan. Everything but `measured` is a prediction. `facts`: what is known only with the trace.

    Raises PlanError if the plan does not belong to the trace, InfeasiblePlanError if it cannot be carried out.
    """
    return {
        **plan.model_dump(mode="json", include={"policy", "trace_fingerprint", "budgets", "predicted"}),
        "moves": len(plan.moves),
        "blocks_moved": len({move.block for move in plan.moves}),
        "host_updates": sum(update.where == "host" for update in plan.updates),
        "reruns": len(plan.recompute),
        "lengths": lengths_of_plan(plan, trace),
        "facts": None if trace is None else _facts(plan, trace),
        "sweep": sweep,
        "comparison": comparison,
        "measured": measured,
    }


def _facts(plan: Plan, trace: Trace) -> Data:
    """Return what the trace tells. `stalls`, `idle`: the longest, and how many there are in all.

    `idle`: in an iteration that never waits. `moves`: how often the plan lets the block leave. `remade`: whether the plan makes
    it anew by a re-run.
    """
    summary = summarise_plan(plan, trace)
    idle = idlest_blocks(block_summaries(trace))
    leaves = Counter(move.block for move in plan.moves)
    remade = {block for each in plan.recompute for block in trace.recompute[each.group].blocks}
    told = ("name", "kind", "size_bytes", "longest_idle_seconds", "idle_seconds")
    return {
        "name": trace.name,
        "work": summary["work"],
        "created_by": trace.created_by,
        "hardware": trace.hardware.name,
        "peak_bytes": max(live_bytes(trace)),
        "floor_bytes": planner.floor(trace)[0],
        "tiles": tiles_of(trace),
        "links": summary["links"],
        "critical": summary["critical"]["seconds"],
        "stalls": summary["stalls"][:_ROWS],
        "stall_count": len(summary["stalls"]),
        "idle": [
            {
                "block": block["id"],
                **{name: block[name] for name in told},
                "moves": leaves[block["id"]],
                "remade": block["id"] in remade,
            }
            for block in idle[:_ROWS]
        ],
        "idle_count": len(idle),
        "timeline": timeline_of(plan, trace),
    }


def measured_run(path: str | os.PathLike[str]) -> Data:
    """Return what the latest run in a file of measured iterations took, to stand beside what its plan predicts.

    `planned`, `iterations`: how many followed a plan, and how many there are. The figures are medians over those that did, by
    link where they are about links; None or empty if none did. `predicted_seconds`: by the plan that the last of them followed.
    Raises FileFormatError with the file, the line and what is wrong.
    """
    found = read_iterations(path)
    if not found:
        raise FileFormatError(f"{path}: no iteration is in it; give the file of a run that has ended some")
    last = max(each.run for each in found)
    iterations = [each for each in found if each.run == last]
    planned = [each for each in iterations if each.phase == "planned"]
    links = dict.fromkeys(link for each in planned for link in each.moved_bytes)
    return {
        "planned": len(planned),
        "iterations": len(iterations),
        "predicted_seconds": planned[-1].predicted_seconds if planned else None,
        **{name: _median(planned, name) for name in ("seconds", "waited_seconds", "recompute_seconds")},
        "moved_bytes": {link: statistics.median(each.moved_bytes.get(link, 0) for each in planned) for link in links},
        "busy_seconds": {link: statistics.median(each.busy_seconds.get(link, 0.0) for each in planned) for link in links},
    }


def _median(iterations: Sequence[IterationStats], name: str) -> float | None:
    return statistics.median(getattr(each, name) for each in iterations) if iterations else None


# From the bottom of the stack to its top.
_KINDS = ("parameter", "gradient", "optimizer_state", "activation", "buffer", "workspace")


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
        trace_fingerprint=trace.fingerprint, policy="nothing moves", budgets=planner.Budgets(device_bytes=max(live_bytes(trace)))
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
