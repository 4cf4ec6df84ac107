"""All that a report tells, as data: the page shows exactly this, and `--json` prints it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import planner
from planner import Plan, Trace
from planner.problem import layer_of, live_bytes, source_blocks
from planner.schema import Stage, Tier
from planner.simulator import Timeline
from teraio.cli.lengths import lengths_of_plan
from teraio.cli.output import Data, format_bytes
from teraio.cli.plan_summary import summarise_moves, summarise_plan
from teraio.cli.report.palette import KINDS
from teraio.cli.trace_summary import block_summaries, tiles_of


def report_of(plan: Plan, trace: Trace, *, sweep: Data | None = None) -> Data:
    """Return the report of a plan: all of it is predicted. `facts`: what its trace tells.

    Raises PlanError if the plan does not belong to the trace, InfeasiblePlanError if it cannot be carried out.
    """
    return {
        **plan.model_dump(mode="json", include={"policy", "trace_fingerprint", "budgets", "predicted"}),
        "moves": len(plan.moves),
        "blocks_moved": len({move.block for move in plan.moves}),
        "host_updates": sum(update.where == "host" for update in plan.updates),
        "reruns": len(plan.recompute),
        "lengths": lengths_of_plan(plan, trace),
        "facts": _facts(plan, trace),
        "sweep": sweep,
    }


def _facts(plan: Plan, trace: Trace) -> Data:
    """Return what the trace tells. `blocks`: see `_blocks`; `timeline`: see `timeline_of`."""
    summary = summarise_plan(plan, trace)
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
        "blocks": _blocks(plan, trace),
        "timeline": timeline_of(plan, trace),
    }


def _blocks(plan: Plan, trace: Trace) -> list[Data]:
    """Return all blocks; a block's number is its place.

    Idle times are those of an iteration that never waits. `moves`: how often the plan lets the block leave. `remade`: whether
    the plan makes it anew by a re-run. `uses`: the stages that use it, with those of the re-runs.
    """
    leaves = Counter(move.block for move in plan.moves)
    remade = {block for each in plan.recompute for block in trace.recompute[each.group].blocks}
    uses: list[list[int]] = [[] for _ in trace.blocks]
    derived = planner.recomputed(trace, plan.recompute)
    for source, block in zip(source_blocks(trace, plan.recompute), derived.blocks, strict=True):
        uses[source] += block.uses
    told = ("name", "kind", "size_bytes", "longest_idle_seconds", "idle_seconds")
    return [
        {
            **{name: block[name] for name in told},
            "moves": leaves[block["id"]],
            "remade": block["id"] in remade,
            "uses": sorted(uses[block["id"]]),
        }
        for block in block_summaries(trace)
    ]


def timeline_of(plan: Plan, trace: Trace) -> Data:
    """Replay the plan. Raises PlanError if it does not belong to the trace, InfeasiblePlanError if it cannot be carried out.

    All times are seconds from the begin of an iteration of the steady state.
    `stages`: each waits from `reached` to `start`; `waits_for` is what ended then. `used_bytes`: of the blocks that it uses.
    `moves`: of the plan, between two uses (`after`, `before`: stages), and `why`. `copies`: of `block` for `move`; one that began
    in the iteration before has a negative `start`. `updates`: those on the host's processor.
    `memory`: what is on the device, `below`: in the tiers below it, and `unplanned`: on the device in an iteration in which
    nothing ever leaves it; see `_memory`.
    """
    replayed = planner.simulate(trace, plan)
    derived, sources = planner.recomputed(trace, plan.recompute), source_blocks(trace, plan.recompute)
    keep_all = Plan(
        trace_fingerprint=trace.fingerprint, policy="nothing moves", budgets=planner.Budgets(device_bytes=max(live_bytes(trace)))
    )
    below: tuple[Tier, ...] = ("host", "storage")
    return {
        "seconds": replayed.iteration_seconds,
        "budget_bytes": plan.budgets.device_bytes,
        "links": [link.name for link in trace.hardware.links],
        "stages": _stages(derived, trace, replayed),
        "moves": [
            {**{name: move[name] for name in ("block", "tier", "after", "before")}, "why": _why(move)}
            for move in summarise_moves(plan, derived)
        ],
        "copies": [
            {
                "link": transfer.link,
                "block": transfer.block,
                "move": transfer.move,
                "queued": transfer.queued_seconds,
                "start": transfer.start_seconds,
                "end": transfer.end_seconds,
            }
            for transfer in replayed.transfers
        ],
        "updates": [
            {
                "subgroup": update.subgroup,
                "name": trace.stages[trace.subgroups[update.subgroup].stage].name,
                "start": update.start_seconds,
                "end": update.end_seconds,
            }
            for update in replayed.updates
        ],
        "memory": _memory(replayed, "device", trace, sources),
        "below": {tier: _memory(replayed, tier, trace, sources) for tier in below if replayed.peak_bytes[tier]},
        "unplanned": _memory(planner.simulate(trace, keep_all), "device", trace, range(len(trace.blocks))),
    }


def _stages(derived: Trace, trace: Trace, replayed: Timeline) -> list[Data]:
    ended: dict[float, list[str]] = {}
    for transfer in replayed.transfers:
        ended.setdefault(transfer.end_seconds, []).append(f"{transfer.link} {trace.blocks[transfer.block].name}")
    for update in replayed.updates:
        ended.setdefault(update.end_seconds, []).append(f"update of subgroup {update.subgroup} on the host")
    used: Counter[int] = Counter()
    for block in derived.blocks:
        for number in block.uses:
            used[number] += block.size_bytes
    return [
        {
            "name": stage.name,
            "phase": stage.phase,
            "layer": _layer(stage),
            "used_bytes": used[stage.id],
            "workspace_bytes": stage.workspace_bytes,
            "reached": times.reached_seconds,
            "start": times.start_seconds,
            "end": times.end_seconds,
            "waits_for": "; ".join(ended.get(times.start_seconds, ())) if times.stall_seconds > 0 else "",
        }
        for stage, times in zip(derived.stages, replayed.stages, strict=True)
    ]


def _layer(stage: Stage) -> str:
    """Return the layer that a stage is of ("layers.3"), or the part of the model; the phase, where a stage is of neither."""
    if stage.phase in ("optimizer", "user"):
        return stage.phase
    return (layer_of(stage.name) or stage.name.partition(":")[0]).rpartition("/")[2]


def _why(move: Data) -> str:
    """Say between which uses the block is away, and which stage needs its room."""
    away = f"away after {move['after_name']}, until {move['before_name']}"
    if move["host_update"] is not None:
        return f"{away}; subgroup {move['host_update']} is updated on the host"
    if move["relieved_name"] is None:
        return f"{away}; no stage would exceed the budget otherwise"
    excess = format_bytes(move["excess_bytes"])
    return f"{away}; if nothing left, {move['relieved_name']} would exceed the budget by {excess}"


def _memory(timeline: Timeline, tier: Tier, trace: Trace, sources: Sequence[int]) -> Data:
    """Return what a tier holds over time. sources: the block of the trace by the number that the timeline gives it.

    `points`: a time, and the bytes of each of `kinds` from then on. `held`: a block, and from when to when it takes room.
    """
    changes = [(seconds, block, size) for seconds, where, block, size in timeline.memory if where == tier]
    of = [trace.blocks[source].kind for source in sources]
    named = [(seconds, "workspace" if block is None else of[block], size) for seconds, block, size in changes]
    present = {kind for _, kind, _ in named}
    kinds = [kind for kind in KINDS if kind in present]
    held: list[list[float]] = []
    since: dict[int, float] = {}
    for seconds, block, size in changes:
        if block is None:
            continue
        if size > 0:
            since[block] = seconds
        else:
            held.append([sources[block], since.pop(block), seconds])
    held += [[sources[block], began, timeline.iteration_seconds] for block, began in since.items()]
    return {"kinds": kinds, "seconds": timeline.iteration_seconds, "points": list(_points(named, kinds)), "held": held}


def _points(changes: Sequence[tuple[float, str, int]], kinds: Sequence[str]) -> Iterable[list[float]]:
    """Yield the bytes of each kind after all changes of an instant."""
    held = dict.fromkeys(kinds, 0)
    for number, (seconds, kind, size) in enumerate(changes):
        held[kind] += size
        if number + 1 == len(changes) or changes[number + 1][0] > seconds:
            yield [seconds, *held.values()]
