"""The result of `teraio simulate`: the replay of a plan, its data and its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import planner
from planner.problem import recompute_seconds
from planner.schema import Link
from planner.simulator import STAGES, PathSegment, critical_path
from teraio.cli import output
from teraio.cli.output import Data, Facts, Page, Table, exact_bytes, format_bytes, format_seconds, share

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
        "critical": {"seconds": path.seconds(), "pieces": [_segment(trace, stages, piece) for piece in path.segments]},
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


def stalls_table(stalls: Sequence[Data], rows: int) -> Table:
    """Return the stages that wait, the longest first."""
    columns = {">stage": "stage", "name": "name", ">waits": "stall_seconds"}
    return Table(title="stages that wait", columns=columns, rows=stalls, most=rows)


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
    return stalls_table(stalls, rows) if stalls else "no stage waits", awaited
