"""The result of `teraio plan` and `teraio inspect PLAN`: a plan and why its blocks move, its data and its page."""

from __future__ import annotations

from collections.abc import Sequence

import planner
from planner.problem import live_bytes
from teraio.cli.output import (
    Column,
    Data,
    Facts,
    Page,
    Table,
    budget_facts,
    exact_bytes,
    format_bytes,
    format_seconds,
    iteration_time,
    named,
    share,
    some_seconds,
    work_of,
)
from teraio.cli.replay_summary import critical_fact, links_table, peak_facts, processor_fact, summarise_replay, waiting
from teraio.cli.trace_summary import copy_seconds


def summarise_plan(plan: planner.Plan, trace: planner.Trace) -> Data:
    """Return the plan in numbers, with names and sizes from its trace, and stalls.

    Stages are numbered as in `planner.recomputed`: a stage that runs again counts as one more.
    `moves`: see `summarise_moves`; by size, largest first. `dropped`: how many of them have no copy out.
    `subgroups`: how many the trace has. `host_updates`: the subgroups that are updated on the host, in that order, and the stage
    that would do it on the device. `reruns`: the forward stages that run again, just before stage `at` of the trace; what they
    make and take, and what copies of that would take.
    `stalls`, `links`, `host_processor` and `critical` come from a replay, see `summarise_replay`.

    Raises PlanError if the plan does not belong to the trace, InfeasiblePlanError if it cannot be carried out.
    """
    replay = summarise_replay(trace, plan, planner.simulate(trace, plan))
    derived = planner.recomputed(trace, plan.recompute)
    return {
        **plan.model_dump(mode="json", include={"policy", "trace_fingerprint", "budgets", "solver", "predicted"}),
        "trace_name": trace.name,
        "work": work_of(trace),
        "blocks_moved": len({move.block for move in plan.moves}),
        "dropped": sum(move.offload is None for move in plan.moves),
        "moves": sorted(summarise_moves(plan, derived), key=lambda move: -move["size_bytes"]),
        "subgroups": len(trace.subgroups),
        "host_updates": [_host_update(update.subgroup, derived) for update in plan.updates if update.where == "host"],
        "reruns": [_rerun(each, trace) for each in plan.recompute],
        **{name: replay[name] for name in ("stalls", "links", "host_processor", "critical")},
    }


def summarise_moves(plan: planner.Plan, trace: planner.Trace) -> list[Data]:
    """Return the moves in the order of the plan, and why. trace: with the plan's re-runs (`planner.recomputed`).

    `offload_start` is None if the block has a valid copy and is only dropped. `prefetch_start` is None if the block does not come
    back: an update on the host consumes it, or nothing uses it before it dies.
    The reason: suppose that no block ever left. Of the stages that run while this block is away, `relieved_stage` would exceed
    the device budget the most, by `excess_bytes`. Both are None if no such stage would exceed it.
    `host_update`: the subgroup whose update on the host needs the block there; such a move needs no other reason.
    """
    excess = [size - plan.budgets.device_bytes for size in live_bytes(trace)]
    on_host = [trace.subgroups[update.subgroup] for update in plan.updates if update.where == "host"]
    updated = {block: subgroup for subgroup in on_host for block in subgroup.blocks}
    return [
        {
            "block": move.block,
            "tier": move.tier,
            "after": move.after,
            "before": move.before,
            "offload_start": None if move.offload is None else move.offload.start,
            "prefetch_start": None if move.prefetch is None else move.prefetch.start,
            **_reason(move, trace, excess, updated.get(move.block)),
        }
        for move in plan.moves
    ]


def _reason(move: planner.Move, trace: planner.Trace, excess: Sequence[int], updated: planner.Subgroup | None) -> Data:
    """Return what the trace tells about a move.

    excess: for each stage the bytes beyond the device budget if no block ever left. updated: the subgroup of the block, if it is
    updated on the host.
    """
    block = trace.blocks[move.block]
    relieved = _relieved(move, excess, consumed=updated is not None)
    return {
        "block_name": block.name,
        "size_bytes": block.size_bytes,
        "after_name": _stage_name(move.after, trace),
        "before_name": _stage_name(move.before, trace),
        "relieved_stage": relieved,
        "relieved_name": None if relieved is None else _stage_name(relieved, trace),
        "excess_bytes": None if relieved is None else excess[relieved],
        "host_update": None if updated is None or not _serves(move, updated.stage, len(excess)) else updated.id,
    }


def _relieved(move: planner.Move, excess: Sequence[int], *, consumed: bool) -> int | None:
    """Return the stage that exceeds the budget the most among those that the block is away in; None if none exceeds it.

    consumed: whether an update on the host consumes the block, if it does not come back.
    """
    leaves = move.after if move.offload is None else move.offload.start
    back = move.before + consumed if move.prefetch is None else move.prefetch.start
    away = (stage % len(excess) for stage in range(leaves + 1, back))
    worst = max(away, key=excess.__getitem__, default=None)
    return worst if worst is not None and excess[worst] > 0 else None


def _serves(move: planner.Move, stage: int, stages: int) -> bool:
    """Return whether the block is away for its update on the host, which `stage` would do on the device.

    See [Note: updates on the host] in `planner.problem.host_updates`.
    """
    return move.prefetch is None or any(move.after < update < move.before for update in (stage, stage + stages))


def _host_update(number: int, trace: planner.Trace) -> Data:
    subgroup = trace.subgroups[number]
    name = _stage_name(subgroup.stage, trace)
    work = {"elements": subgroup.elements, "seconds": subgroup.host_seconds}
    return {"subgroup": number, "stage": subgroup.stage, "stage_name": name, **work}


def _rerun(each: planner.Recompute, trace: planner.Trace) -> Data:
    group = trace.recompute[each.group]
    blocks = [trace.blocks[number] for number in group.blocks]
    return {
        "group": each.group,
        "at": each.at,
        "stage": group.stage,
        "stage_name": trace.stages[group.stage].name,
        "at_name": trace.stages[each.at].name,
        "size_bytes": sum(block.size_bytes for block in blocks),
        "seconds": group.duration_seconds,
        "copy_seconds": copy_seconds(trace, blocks),
    }


def _stage_name(stage: int, trace: planner.Trace) -> str:
    iteration, position = divmod(stage, len(trace.stages))
    return trace.stages[position].name + (" (next iteration)" if iteration else "")


def plan_page(plan: Data, rows: int) -> Page:
    """Show overview, prediction, moves and re-runs, links, stalls and critical path, `rows` of each."""
    solver, critical, predicted, processor = plan["solver"], plan["critical"], plan["predicted"], plan["host_processor"]
    ended = solver["status"] if solver["gap"] is None else f"{solver['status']}, gap {solver['gap']:.2%}"
    iteration = sum(critical["seconds"].values())
    overview = {
        "plan for": plan["trace_name"],
        "policy": plan["policy"],
        "solver": f"{solver['name']}: {ended}, {format_seconds(solver['solve_seconds'])}",
        **budget_facts(plan["budgets"]),
        "moves": f"{len(plan['moves'])} of {plan['blocks_moved']} blocks, {plan['dropped']} without a copy out",
        "recomputed": _recomputed(plan["reruns"]),
        "updates on the host": _updates(plan["host_updates"], plan["subgroups"]),
        "host's processor": processor_fact(processor, iteration),
        "critical path": critical_fact(critical),
    }
    return (
        Facts(overview),
        *([Facts(_prediction(predicted, plan["work"]), title="predicted, per iteration")] if predicted else []),
        _moves(plan["moves"], rows),
        _reruns(plan["reruns"], rows),
        links_table(plan["links"], iteration),
        *waiting(plan["stalls"], critical, rows),
    )


def _prediction(predicted: Data, work: Data | None) -> dict[str, str]:
    stall, iteration = predicted["stall_seconds"], predicted["iteration_seconds"]
    return {
        "iteration": iteration_time(iteration, work),
        "without waiting": format_seconds(predicted["ideal_seconds"]),
        "recomputation": some_seconds(predicted.get("recompute_seconds")),
        "no plan is faster than": format_seconds(predicted["lower_bound_seconds"]),
        "stall": f"{format_seconds(stall)}, {share(stall, iteration)}",
        **peak_facts(predicted["peak_bytes"]),
        **{f"moved {link}": exact_bytes(size) for link, size in predicted["moved_bytes"].items()},
    }


def _recomputed(reruns: Sequence[Data]) -> str:
    """Return how many stages run again, how long that takes, and how long copying instead would take."""
    if not reruns:
        return ""
    stages = f"{len(reruns)} forward stages"
    size, seconds = sum(each["size_bytes"] for each in reruns), sum(each["seconds"] for each in reruns)
    copies = sum(each["copy_seconds"] or 0.0 for each in reruns)
    saved = f" in place of {format_seconds(copies)} of copies" if copies else ""
    return f"{stages}, {format_bytes(size)}: {format_seconds(seconds)}{saved}"


def _reruns(reruns: Sequence[Data], rows: int) -> Table:
    """The last two columns tell why a stage runs again: what it takes, and what copying its blocks out and in would take."""
    columns: dict[str, Column] = {
        ">group": "group",
        "stage": lambda each: named(each["stage"], each["stage_name"]),
        "runs again before": lambda each: named(each["at"], each["at_name"]),
        ">makes": "size_bytes",
        ">in": "seconds",
        ">copies would take": "copy_seconds",
    }
    return Table(title="recomputed", columns=columns, rows=reruns, most=rows)


def _moves(moves: Sequence[Data], rows: int) -> Table:
    """The last two columns tell why a block moves."""

    def excess(move: Data) -> str:
        if move["excess_bytes"] is not None:
            return format_bytes(move["excess_bytes"])
        return "no stage" if move["host_update"] is None else "for its update"

    columns: dict[str, Column] = {
        "block": lambda move: named(move["block"], move["block_name"]),
        ">size": "size_bytes",
        "tier": "tier",
        "after": lambda move: named(move["after"], move["after_name"]),
        "before": lambda move: named(move["before"], move["before_name"]),
        ">copy out": lambda move: "dropped" if move["offload_start"] is None else str(move["offload_start"]),
        ">copy in": lambda move: "does not come back" if move["prefetch_start"] is None else str(move["prefetch_start"]),
        ">over budget if nothing leaves": excess,
        "in": lambda move: named(move["relieved_stage"], move["relieved_name"]),
    }
    return Table(title="moves", columns=columns, rows=moves, most=rows)


def _updates(host_updates: Sequence[Data], subgroups: int) -> str:
    return f"{len(host_updates)} of {subgroups} subgroups" if subgroups else ""
