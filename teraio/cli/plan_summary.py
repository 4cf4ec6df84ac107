"""The results of `teraio plan` and `teraio inspect PLAN`, a plan and why its blocks move; that of `teraio simulate`: a replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import planner
from planner.problem import SolverSettings, live_bytes, recompute_seconds
from planner.schema import Link, short_fingerprint
from planner.simulator import STAGES, PathSegment, critical_path, seconds_by_resource
from teraio.cli import output
from teraio.cli.advice import planned
from teraio.cli.arguments import as_options
from teraio.cli.output import Column, Data, Facts, Page, Table, exact_bytes, format_bytes, format_seconds, share
from teraio.cli.trace_summary import copy_seconds

# -- the replay of a plan

_ROUNDING_SECONDS = 1e-9  # sums of times differ by less: a shorter stall is none


def summarise_replay(trace: planner.Trace, plan: planner.Plan, timeline: planner.Timeline) -> Data:
    """Return the replay of `plan` on `trace` in numbers.

    `ideal_seconds`: of the trace, with all updates on the device and without re-runs; these take `recompute_seconds`. An
    iteration with updates on the host can be shorter than that, and its stalls can add up to more than its excess over it.
    `planned_seconds`: the iteration time in the plan's file. `links`, `host_processor`: the work of each in one iteration of the
    steady state. `stalls`: stages that wait for their inputs, or for room; longest first.
    `critical`: the critical path, which is why the iteration takes as long as it does. `pieces`: its segments in order, without
    gaps between them, in seconds from the iteration's start. `index`: number of the stage, the subgroup or the move. `seconds`:
    time on the path by resource ("stages", "host updates" or a link), largest first; the sum is the iteration's time.
    """
    stages = planner.recomputed(trace, plan.recompute).stages
    stalls = [
        {"stage": stage.id, "name": stage.name, "stall_seconds": times.stall_seconds}
        for stage, times in zip(stages, timeline.stages, strict=True)
        if times.stall_seconds > _ROUNDING_SECONDS
    ]
    path = critical_path(trace, plan, timeline)
    return {
        "work": output.work_of(trace),
        "iteration_seconds": timeline.iteration_seconds,
        "ideal_seconds": trace.ideal_seconds,
        "recompute_seconds": recompute_seconds(trace, plan.recompute),
        "stall_seconds": timeline.stall_seconds,
        "planned_seconds": None if plan.predicted is None else plan.predicted.iteration_seconds,
        "device_budget_bytes": plan.budgets.device_bytes,
        "peak_bytes": dict(timeline.peak_bytes),
        "moved_bytes": dict(timeline.moved_bytes),
        "storage_written_bytes": timeline.storage_written_bytes,
        "links": [_link(link, timeline) for link in trace.hardware.links],
        "host_processor": {
            "updates": len(timeline.updates),
            "busy_seconds": sum(update.end_seconds - update.start_seconds for update in timeline.updates),
        },
        "stalls": sorted(stalls, key=lambda stall: -stall["stall_seconds"]),
        "critical": {"seconds": seconds_by_resource(path), "pieces": [_segment(trace, stages, piece) for piece in path]},
    }


def _link(link: Link, timeline: planner.Timeline) -> Data:
    transfers = [transfer for transfer in timeline.transfers if transfer.link == link.name]
    return {
        "link": link.name,
        "bytes_per_second": link.bytes_per_second,
        "transfers": len(transfers),
        "size_bytes": timeline.moved_bytes.get(link.name, 0),
        "busy_seconds": sum(transfer.end_seconds - transfer.start_seconds for transfer in transfers),
    }


def _segment(trace: planner.Trace, stages: Sequence[planner.Stage], piece: PathSegment) -> Data:
    if piece.block is not None:
        name = trace.blocks[piece.block].name
    elif piece.resource == STAGES:
        name = stages[piece.index].name
    else:
        name = trace.stages[trace.subgroups[piece.index].stage].name
    times = {"start_seconds": piece.start_seconds, "end_seconds": piece.end_seconds}
    return {"resource": piece.resource, "index": piece.index, "name": name, **times}


def replay_page(replay: Data, rows: int) -> Page:
    """Show overview, links, and `rows` each of the longest stalls and of the copies on the critical path."""
    iteration = replay["iteration_seconds"]
    overview = {
        "iteration": output.iteration_time(iteration, replay["work"]),
        "in the plan's file": "not given" if replay["planned_seconds"] is None else format_seconds(replay["planned_seconds"]),
        "without waiting": format_seconds(replay["ideal_seconds"]),
        "recomputation": output.some_seconds(replay["recompute_seconds"]),
        "stall": f"{format_seconds(replay['stall_seconds'])}, {share(replay['stall_seconds'], iteration)}",
        "device budget": output.budget(replay["device_budget_bytes"]),
        **peak_facts(replay["peak_bytes"]),
        "host's processor": processor_fact(replay["host_processor"], iteration),
        "written to storage": exact_bytes(replay["storage_written_bytes"]),
        "critical path": critical_fact(replay["critical"]),
    }
    links = links_table(replay["links"], iteration)
    return Facts(overview), links, *waiting(replay["stalls"], replay["critical"], rows)


def peak_facts(peak_bytes: Mapping[str, int]) -> dict[str, str]:
    """Return the peak of each tier that is used."""
    return {f"peak of {tier}": exact_bytes(size) for tier, size in peak_bytes.items() if size}


def processor_fact(processor: Data, iteration_seconds: float) -> str:
    """Return what the host's processor does in an iteration; "" if it does nothing."""
    updates, seconds = processor["updates"], processor["busy_seconds"]
    if not updates:
        return ""
    return f"{updates} update{'s' if updates > 1 else ''}, busy {format_seconds(seconds)}, {share(seconds, iteration_seconds)}"


def critical_fact(critical: Data) -> str:
    """Return the share of each resource of the critical path."""
    whole = sum(critical["seconds"].values())
    return ", ".join(f"{resource} {share(seconds, whole)}" for resource, seconds in critical["seconds"].items())


def links_table(links: Sequence[Data], iteration_seconds: float) -> Table:
    """Return what each link carries in an iteration."""
    return Table(
        columns={
            "link": "link",
            ">copies": "transfers",
            ">size": "size_bytes",
            ">busy": "busy_seconds",
            ">of the iteration": lambda link: share(link["busy_seconds"], iteration_seconds),
            ">rate then": lambda link: link["busy_seconds"] and f"{format_bytes(link['size_bytes'] / link['busy_seconds'])}/s",
            ">of": "bytes_per_second",
        },
        rows=links,
    )


def waiting(stalls: Sequence[Data], critical: Data, rows: int) -> Page:
    """Return the stages that wait, and the copies and updates on the critical path, `rows` of each.

    The iteration gets shorter only if these, or stages on the critical path, do.
    """
    awaited = Table(
        title="on the critical path beside the stages",
        columns={
            "on": "resource",
            "what": "name",
            ">begins": "start_seconds",
            ">takes": lambda piece: format_seconds(piece["end_seconds"] - piece["start_seconds"]),
        },
        rows=sorted(
            (piece for piece in critical["pieces"] if piece["resource"] != STAGES),
            key=lambda piece: piece["start_seconds"] - piece["end_seconds"],
        ),
        most=rows,
    )
    waits = {">stage": "stage", "name": "name", ">waits": "stall_seconds"}
    return Table(title="stages that wait", columns=waits, rows=stalls, most=rows) if stalls else "no stage waits", awaited


# -- a plan and why its blocks move


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
        "host_updates": [_host_update(number, derived) for number in plan.on_host],
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
    on_host = [] if trace is None else [trace.subgroups[number] for number in plan.on_host]
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
    back = move.before + consumed if move.prefetch is None else move.prefetch.start
    away = [*excess, *excess][move.leaves + 1 : back]
    most = max(away, default=0)
    return (move.leaves + 1 + away.index(most)) % len(excess) if most > 0 else None


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


# -- time against budget, for `teraio sweep`

Progress = Callable[[str], None]  # called with a text that says what is being planned now


def sweep_budgets(
    trace: planner.Trace,
    device_bytes: Sequence[int],
    budgets: planner.Budgets,
    policy: str,
    *,
    settings: SolverSettings,
    progress: Progress,
) -> Data:
    """Plan for each of `device_bytes`, with the other budgets as in `budgets`.

    A plan for a smaller budget is a candidate for a larger one, so that a larger budget is never slower.
    `points`: by device budget, ascending. `planned_for_bytes`: the budget that the best plan was made for, which is this one or
    a smaller one; None without a plan.
    """
    points: list[Data] = []
    best: planner.Plan | None = None
    for number, size in enumerate(sorted(device_bytes), 1):
        progress(f"planning for {exact_bytes(size)}, {number} of {len(device_bytes)}")
        tried = budgets.model_copy(update={"device_bytes": size})
        made, _, reason = planned(trace, tried, settings, policy=policy, incumbents=[best] if best else [])
        planned_for = made and made.budgets.device_bytes
        predicted = made and output.data_of(made)["predicted"]
        error = as_options(reason)
        points.append({"device_bytes": size, "planned_for_bytes": planned_for, "predicted": predicted, "error": error})
        best = made or best
    return {
        "trace_name": trace.name,
        "policy": policy,
        "work": output.work_of(trace),
        "ideal_seconds": trace.ideal_seconds,
        "floor_bytes": planner.floor(trace)[0],
        "peak_bytes": max(live_bytes(trace)),
        "points": points,
    }


def sweep_page(sweep: Data) -> Page:
    """Show iteration time against device budget."""
    overview = {
        "trace": sweep["trace_name"],
        "policy": sweep["policy"],
        "without waiting": format_seconds(sweep["ideal_seconds"]),
        "floor (smallest budget)": exact_bytes(sweep["floor_bytes"]),
        "peak if nothing moves": exact_bytes(sweep["peak_bytes"]),
    }
    return Facts(overview), sweep_table(sweep)


def sweep_table(sweep: Data) -> Table:
    """Return a row for each device budget."""

    def note(point: Data) -> str:
        planned_for = point["planned_for_bytes"]
        smaller = planned_for is not None and planned_for < point["device_bytes"]
        return f"the plan for {output.in_asked_unit(planned_for)}" if smaller else point["error"]

    def beyond(point: Data) -> str:
        ideal = sweep["ideal_seconds"]
        return f"{point['predicted']['iteration_seconds'] / ideal - 1:.1%}" if point["predicted"] and ideal else ""

    columns: dict[str, Column] = {
        ">device budget": lambda point: output.in_asked_unit(point["device_bytes"]),
        ">iteration": "predicted.iteration_seconds",
        **output.rate_columns(sweep["work"]),
        ">over no waiting": beyond,
        ">stall": "predicted.stall_seconds",
        ">recomputed": lambda point: point["predicted"] and format_seconds(point["predicted"].get("recompute_seconds", 0.0)),
        ">moved": lambda point: point["predicted"] and format_bytes(sum(point["predicted"]["moved_bytes"].values())),
        ">written to storage": "predicted.storage_written_bytes",
        "note": note,
    }
    return Table(columns=columns, rows=sweep["points"])
