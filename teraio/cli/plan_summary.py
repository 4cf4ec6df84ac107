"""The result of `teraio plan` and `teraio inspect PLAN`: a plan and why its blocks move, its data and its page."""

from __future__ import annotations

from collections.abc import Sequence

import planner
from planner.problem import live_bytes
from planner.schema import short_fingerprint
from teraio.cli import output
from teraio.cli.output import Column, Data, Facts, Page, Table, exact_bytes, format_bytes, format_seconds, share
from teraio.cli.replay_summary import critical_fact, links_table, peak_facts, processor_fact, summarise_replay, waiting
from teraio.cli.trace_summary import copy_seconds


def summarise_plan(plan: planner.Plan, trace: planner.Trace | None = None) -> Data:
    """Return the plan in numbers; with names, sizes and stalls if `trace` is given.

    Stages are numbered as in `planner.recomputed`: a stage that runs again counts as one more.
    `moves`: see `summarise_moves`; by size, largest first; in the plan's order without the trace. `dropped`: how many of them
    have no copy out. `subgroups`: how many the trace has. `host_updates`: the subgroups that are updated on the host, in that
    order, and the stage that would do it on the device. `reruns`: the forward stages that run again, just before stage `at` of
    the trace; what they make and take, and what copies of that would take.
    `stalls`, `links`, `host_processor` and `critical` come from a replay, see `summarise_replay`. They and `subgroups` are None
    without the trace, as is all that it tells about updates and re-runs.

    Raises PlanError if the plan does not belong to the trace, InfeasiblePlanError if it cannot be carried out.
    """
    derived = replay = None
    if trace is not None:
        replay = summarise_replay(trace, plan, planner.simulate(trace, plan))
        derived = planner.recomputed(trace, plan.recompute)
    moves = summarise_moves(plan, derived)
    return {
        **plan.model_dump(mode="json", include={"policy", "trace_fingerprint", "budgets", "solver", "predicted"}),
        "trace_name": None if trace is None else trace.name,
        "work": None if trace is None else output.work_of(trace),
        "blocks_moved": len({move.block for move in plan.moves}),
        "dropped": sum(move.offload is None for move in plan.moves),
        "moves": sorted(moves, key=lambda move: -(move["size_bytes"] or 0)),
        "subgroups": None if trace is None else len(trace.subgroups),
        "host_updates": [_host_update(update.subgroup, derived) for update in plan.updates if update.where == "host"],
        "reruns": [_rerun(each, trace) for each in plan.recompute],
        **{name: replay and replay[name] for name in ("stalls", "links", "host_processor", "critical")},
    }


def summarise_moves(plan: planner.Plan, trace: planner.Trace | None) -> list[Data]:
    """Return the moves in the order of the plan. trace: with the plan's re-runs (`planner.recomputed`), for names and reasons.

    `offload_start` is None if the block has a valid copy and is only dropped. `prefetch_start` is None if the block does not come
    back: an update on the host consumes it, or nothing uses it before it dies.
    The reason: suppose that no block ever left. Of the stages that run while this block is away, `relieved_stage` would exceed
    the device budget the most, by `excess_bytes`. Both are None if no such stage would exceed it.
    `host_update`: the subgroup whose update on the host needs the block there; such a move needs no other reason.
    """
    excess = [] if trace is None else [size - plan.budgets.device_bytes for size in live_bytes(trace)]
    on_host = [] if trace is None else [trace.subgroups[update.subgroup] for update in plan.updates if update.where == "host"]
    updated = {block: subgroup for subgroup in on_host for block in subgroup.blocks}
    return [
        {
            "block": move.block,
            "tier": move.tier,
            "after": move.after,
            "before": move.before,
            "offload_start": None if move.offload is None else move.offload.start,
            "prefetch_start": None if move.prefetch is None else move.prefetch.start,
            **(dict.fromkeys(_REASONS) if trace is None else _reason(move, trace, excess, updated.get(move.block))),
        }
        for move in plan.moves
    ]


_REASONS = "block_name size_bytes after_name before_name relieved_stage relieved_name excess_bytes host_update".split()


def _reason(move: planner.Move, trace: planner.Trace, excess: Sequence[int], updated: planner.Subgroup | None) -> Data:
    """Return what the trace tells about a move.

    excess: for each stage the bytes beyond the device budget if no block ever left. updated: the subgroup of the block, if it is
    updated on the host.
    """
    block = trace.blocks[move.block]
    relieved = _relieved(move, excess, consumed=updated is not None)
    values = (
        block.name,
        block.size_bytes,
        _stage_name(move.after, trace),
        _stage_name(move.before, trace),
        relieved,
        None if relieved is None else _stage_name(relieved, trace),
        None if relieved is None else excess[relieved],
        None if updated is None or not _serves(move, updated.stage, len(excess)) else updated.id,
    )
    return dict(zip(_REASONS, values, strict=True))


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


def _host_update(number: int, trace: planner.Trace | None) -> Data:
    if trace is None:
        return {"subgroup": number, **dict.fromkeys(("stage", "stage_name", "elements", "seconds"))}
    subgroup = trace.subgroups[number]
    name = _stage_name(subgroup.stage, trace)
    work = {"elements": subgroup.elements, "seconds": subgroup.host_seconds}
    return {"subgroup": number, "stage": subgroup.stage, "stage_name": name, **work}


def _rerun(each: planner.Recompute, trace: planner.Trace | None) -> Data:
    known = {"group": each.group, "at": each.at}
    if trace is None:
        return {**known, **dict.fromkeys(("stage", "stage_name", "at_name", "size_bytes", "seconds", "copy_seconds"))}
    group = trace.recompute[each.group]
    blocks = [trace.blocks[number] for number in group.blocks]
    return {
        **known,
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
    """Show overview, prediction, moves and re-runs, `rows` of each; with links, stalls and critical path if it was replayed."""
    solver, critical, predicted, processor = plan["solver"], plan["critical"], plan["predicted"], plan["host_processor"]
    ended = solver["status"] if solver["gap"] is None else f"{solver['status']}, gap {solver['gap']:.2%}"
    iteration = sum(critical["seconds"].values()) if critical else 0.0
    overview = {
        "plan for": plan["trace_name"] or f"trace {short_fingerprint(plan['trace_fingerprint'])}",
        "policy": plan["policy"],
        "solver": f"{solver['name']}: {ended}, {format_seconds(solver['solve_seconds'])}",
        **output.budget_facts(plan["budgets"]),
        "moves": f"{len(plan['moves'])} of {plan['blocks_moved']} blocks, {plan['dropped']} without a copy out",
        "recomputed": _recomputed(plan["reruns"]),
        "updates on the host": _updates(plan["host_updates"], plan["subgroups"]),
        "host's processor": processor_fact(processor, iteration) if processor else "",
        "critical path": critical_fact(critical) if critical else "",
    }
    return (
        Facts(overview),
        *([Facts(_prediction(predicted, plan["work"]), title="predicted, per iteration")] if predicted else []),
        _moves(plan["moves"], rows),
        _reruns(plan["reruns"], rows),
        links_table(plan["links"] or (), iteration),
        *(waiting(plan["stalls"], critical, rows) if critical else []),
    )


def _prediction(predicted: Data, work: Data | None) -> dict[str, str]:
    stall, iteration = predicted["stall_seconds"], predicted["iteration_seconds"]
    return {
        "iteration": output.iteration_time(iteration, work),
        "without waiting": format_seconds(predicted["ideal_seconds"]),
        "recomputation": output.some_seconds(predicted.get("recompute_seconds")),
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
    if any(each["seconds"] is None for each in reruns):
        return stages
    size, seconds = sum(each["size_bytes"] for each in reruns), sum(each["seconds"] for each in reruns)
    copies = sum(each["copy_seconds"] or 0.0 for each in reruns)
    saved = f" in place of {format_seconds(copies)} of copies" if copies else ""
    return f"{stages}, {format_bytes(size)}: {format_seconds(seconds)}{saved}"


def _reruns(reruns: Sequence[Data], rows: int) -> Table:
    """The last two columns tell why a stage runs again: what it takes, and what copying its blocks out and in would take."""
    columns: dict[str, Column] = {
        ">group": "group",
        "stage": lambda each: output.named(each["stage"], each["stage_name"]),
        "runs again before": lambda each: output.named(each["at"], each["at_name"]),
        ">makes": "size_bytes",
        ">in": "seconds",
        ">copies would take": "copy_seconds",
    }
    return Table(title="recomputed", columns=columns, rows=reruns, most=rows)


def _moves(moves: Sequence[Data], rows: int) -> Table:
    """The last two columns tell why a block moves. They need the trace and are left out without it."""

    def excess(move: Data) -> str:
        if move["excess_bytes"] is not None:
            return format_bytes(move["excess_bytes"])
        return "no stage" if move["host_update"] is None else "for its update"

    reasons: dict[str, Column] = {
        ">over budget if nothing leaves": excess,
        "in": lambda move: output.named(move["relieved_stage"], move["relieved_name"]),
    }
    columns: dict[str, Column] = {
        "block": lambda move: output.named(move["block"], move["block_name"]),
        ">size": "size_bytes",
        "tier": "tier",
        "after": lambda move: output.named(move["after"], move["after_name"]),
        "before": lambda move: output.named(move["before"], move["before_name"]),
        ">copy out": lambda move: "dropped" if move["offload_start"] is None else str(move["offload_start"]),
        ">copy in": lambda move: "does not come back" if move["prefetch_start"] is None else str(move["prefetch_start"]),
        **(reasons if any(move["size_bytes"] is not None for move in moves) else {}),
    }
    return Table(title="moves", columns=columns, rows=moves, most=rows)


def _updates(host_updates: Sequence[Data], subgroups: int | None) -> str:
    if subgroups is None:
        return str(len(host_updates)) if host_updates else ""
    return f"{len(host_updates)} of {subgroups} subgroups" if subgroups else ""
