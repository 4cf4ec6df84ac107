"""The result of `teraio inspect TRACE`: a trace in numbers, its data and its page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TypeVar

import planner
from planner.problem import block_activities, host_updatable, live_bytes, mean_active_fraction
from planner.schema import WaitingTier, short_fingerprint
from teraio.cli import output
from teraio.cli.lengths import lengths_of_trace
from teraio.cli.output import Column, Data, Facts, Page, Table, exact_bytes, format_bytes, format_seconds

Item = TypeVar("Item")
Key = TypeVar("Key")


def summarise_trace(trace: planner.Trace) -> Data:
    """Return the trace in numbers.

    `collective_seconds`: the part of `ideal_seconds` in collectives; of stages too. `peak_bytes`, `peak_stage`: the most bytes on
    the device if no block ever leaves, and the stage in which that is. `floor_bytes`, `floor_stage`: the smallest device budget
    that works, and the stage that needs it; `sliced_floor_bytes`: the same where large parameters are updated in slices.
    `mean_active_fraction`: average share of the movable bytes that is in use.
    `tiles`: see `tiles_of`. `lengths`: time, peak and floor by the length of inputs; empty where that does not vary.
    `updates`: on the device (all subgroups), then on the host (those that can be updated there); empty without subgroups.
    `recompute`: how many stages can run again, the blocks that they make, the time that this and copying them would take, and
    why the others cannot. `stages`: `live_bytes` is what is on the device meanwhile if no block ever leaves. `blocks`: see
    `block_summaries`; largest first.
    """
    live = live_bytes(trace)
    peak_stage = max(range(len(live)), key=live.__getitem__)
    floor_bytes, floor_stage = planner.floor(trace)
    return {
        "name": trace.name,
        "created_by": trace.created_by,
        "fingerprint": trace.fingerprint,
        "hardware": output.data_of(trace.hardware),
        "work": output.work_of(trace),
        "ideal_seconds": trace.ideal_seconds,
        "collective_seconds": sum(stage.collective_seconds for stage in trace.stages),
        "peak_bytes": live[peak_stage],
        "peak_stage": trace.stages[peak_stage].name,
        "floor_bytes": floor_bytes,
        "floor_stage": trace.stages[floor_stage].name,
        "sliced_floor_bytes": planner.floor(trace, in_slices=True)[0],
        "mean_active_fraction": mean_active_fraction(trace),
        "phases": [
            {"phase": phase, "stages": len(stages), "duration_seconds": sum(stage.duration_seconds for stage in stages)}
            for phase, stages in _grouped(trace.stages, lambda stage: stage.phase)
        ],
        "kinds": [
            {
                "kind": kind,
                "blocks": len(blocks),
                "size_bytes": sum(block.size_bytes for block in blocks),
                "movable_bytes": sum(block.size_bytes for block in blocks if block.movable),
            }
            for kind, blocks in _grouped(trace.blocks, lambda block: block.kind)
        ],
        "tiles": tiles_of(trace),
        "lengths": lengths_of_trace(trace),
        "updates": _updates(trace),
        "recompute": _recompute(trace),
        "stages": [{**dict(stage), "live_bytes": live[stage.id]} for stage in trace.stages],
        "blocks": sorted(block_summaries(trace), key=lambda block: (-block["size_bytes"], block["id"])),
    }


def tiles_of(trace: planner.Trace) -> Data:
    """Return what runs in tiles of its rows. `floor_bytes`: the smallest device budget without, by estimate. `share`: of the
    time of the iteration: what is computed once more for their sake. `layers`: by graph. `words`: all of it.
    """
    floor_bytes, _ = planner.floor(trace)
    again_seconds = sum(each.again_seconds for each in trace.tiled)
    return {
        "layers": output.data_of(trace)["tiled"] if trace.tiled else [],
        "floor_bytes": max([floor_bytes, *(each.whole_bytes for each in trace.tiled)]),
        "share": again_seconds / trace.ideal_seconds if trace.ideal_seconds else 0.0,
        "words": _tiles_in_words(trace, floor_bytes, again_seconds),
    }


_MOST_NAMED = 4


def _tiles_in_words(trace: planner.Trace, floor_bytes: int, again_seconds: float) -> str:
    """Return what runs in tiles, and what that gains and costs; "" if nothing does."""
    if not trace.tiled:
        return ""
    largest = sorted(trace.tiled, key=lambda each: -each.whole_bytes)
    layers = list(dict.fromkeys(f"{each.what.partition('/')[2]} in {each.tiles} tiles" for each in largest))
    text = ", ".join(layers[:_MOST_NAMED]) + f" and {len(layers) - _MOST_NAMED} more" * (len(layers) > _MOST_NAMED)
    whole = max(floor_bytes, largest[0].whole_bytes)
    computed = trace.ideal_seconds - again_seconds
    slower = f", {again_seconds / computed:.1%} slower" if again_seconds and computed > 0 else ""
    return f"{text}: floor {format_bytes(whole)} → {format_bytes(floor_bytes)}{slower}"


def block_summaries(trace: planner.Trace) -> list[Data]:
    """Return each block and its use in an iteration that never waits.

    `active_fraction`: share of the iteration time in which a stage uses it. `idle_seconds`: length of all its inactive periods.
    `longest_idle_seconds`: length of the longest. `clean`: whether no stage writes it, so that it needs no copy out.
    """
    return [
        {**output.data_of(block), **asdict(found)} for block, found in zip(trace.blocks, block_activities(trace), strict=True)
    ]


def copy_seconds(trace: planner.Trace, blocks: Iterable[planner.Block]) -> float | None:
    """Return the time of copying blocks out and in again on the links of the tier where that is shortest, if nothing else used
    them; None if no tier can be used."""
    tiers: tuple[WaitingTier, ...] = ("host", "storage")
    sizes = [block.size_bytes for block in blocks]
    times = []
    for tier in tiers:
        out, back = trace.hardware.link("device", tier), trace.hardware.link(tier, "device")
        if out is not None and back is not None:
            times.append(sum(out.seconds(size) + back.seconds(size) for size in sizes))
    return min(times, default=None)


def _grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> Iterable[tuple[Key, list[Item]]]:
    """Return the items by their key, in the order in which the keys come."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups.items()


def _updates(trace: planner.Trace) -> list[Data]:
    if not trace.subgroups:
        return []
    places = {
        "device": [(subgroup.elements, subgroup.device_seconds) for subgroup in trace.subgroups],
        "host": [(subgroup.elements, subgroup.host_seconds or 0.0) for subgroup in host_updatable(trace)],  # none is None
    }
    return [
        {
            "where": where,
            "subgroups": len(updates),
            "elements": sum(elements for elements, _ in updates),
            "seconds": sum(seconds for _, seconds in updates),
        }
        for where, updates in places.items()
    ]


def _recompute(trace: planner.Trace) -> Data:
    reasons = _grouped(trace.not_recomputed, lambda entry: entry.reason)
    blocks = [trace.blocks[number] for group in trace.recompute for number in group.blocks]
    return {
        "groups": len(trace.recompute),
        "size_bytes": sum(block.size_bytes for block in blocks),
        "seconds": sum(group.duration_seconds for group in trace.recompute),
        "copy_seconds": copy_seconds(trace, blocks),
        "not_recomputed": [
            {"reason": reason, "stages": len(entries), "example": trace.stages[entries[0].stage].name}
            for reason, entries in sorted(reasons, key=lambda entry: -len(entry[1]))
        ],
    }


def trace_page(trace: Data, rows: int) -> Page:
    """Show overview, phases, kinds of blocks, optimizer subgroups, links and their shared rates.

    Then `rows` each of the longest stages, of the largest blocks and of those with the longest inactive periods.
    """
    overview = {
        "trace": trace["name"],
        "made by": trace["created_by"],
        "fingerprint": short_fingerprint(trace["fingerprint"]),
        "hardware": trace["hardware"]["name"],
        "without waiting": output.iteration_time(trace["ideal_seconds"], trace["work"]),
        "of that in collectives": output.some_seconds(trace["collective_seconds"]),
        "peak if nothing moves": f"{exact_bytes(trace['peak_bytes'])}, in {trace['peak_stage']}",
        "floor (smallest budget)": f"{exact_bytes(trace['floor_bytes'])}, set by {trace['floor_stage']}",
        "with updates in slices": sliced_floor(trace),
        "in tiles": trace["tiles"]["words"],
        "can be recomputed": _recomputed(trace["recompute"]),
        "active on average": f"{trace['mean_active_fraction']:.1%} of the bytes that may move",
    }
    kinds = {"kind": "kind", ">blocks": "blocks", ">size": "size_bytes", ">may move": "movable_bytes"}
    updates: dict[str, Column] = {
        "can update on": "where",
        ">subgroups": "subgroups",
        ">elements": lambda update: f"{update['elements']:,}",
        ">time": "seconds",
    }
    lengths: dict[str, Column] = {
        ">length": lambda row: f"{row['length']:,}",
        ">without waiting": "ideal_seconds",
        ">peak if nothing moves": "peak_bytes",
        ">floor": "floor_bytes",
    }
    reasons = {"cannot be recomputed, because": "reason", ">stages": "stages", "such as": "example"}
    return (
        Facts(overview),
        Table(columns={"phase": "phase", ">stages": "stages", ">time": "duration_seconds"}, rows=trace["phases"]),
        Table(title="by the length of inputs", columns=lengths, rows=trace["lengths"]),
        Table(columns=kinds, rows=trace["kinds"]),
        Table(columns=updates, rows=trace["updates"]),
        Table(columns=reasons, rows=trace["recompute"]["not_recomputed"]),
        *_links(trace["hardware"]),
        *_longest(trace, rows),
    )


def sliced_floor(found: Data) -> str:
    """Return the smallest device budget where large parameters are updated in slices; "" where that is no less."""
    return exact_bytes(found["sliced_floor_bytes"]) if found["sliced_floor_bytes"] < found["floor_bytes"] else ""


def _recomputed(recompute: Data) -> str:
    """Return what the groups make and what that takes, against the time of copying it out and in; empty without groups."""
    if not recompute["groups"]:
        return ""
    stages, copies = f"{recompute['groups']} stages", recompute["copy_seconds"]
    made = f"{format_bytes(recompute['size_bytes'])} by {stages}, in {format_seconds(recompute['seconds'])}"
    return made if copies is None else f"{made} (to copy out and in: {format_seconds(copies)})"


def _links(hardware: Data) -> Page:
    links: dict[str, Column] = {
        "link": lambda link: f"{link['from']}->{link['to']}",
        ">rate": "bytes_per_second",
        ">latency": "latency_seconds",
        **({"path": "path"} if any(link.get("path") for link in hardware["links"]) else {}),
    }
    shared: dict[str, Column] = {
        "shared rate": "name",
        ">at the most": "bytes_per_second",
        "by": lambda rate: ", ".join(rate["links"]),
    }
    return Table(columns=links, rows=hardware["links"]), Table(columns=shared, rows=hardware["shared"])


def _longest(trace: Data, rows: int) -> Page:
    stage = {">stage": "id", "name": "name", ">time": "duration_seconds"}
    size = {">workspace": "workspace_bytes", ">if nothing moves": "live_bytes"}
    stages = sorted(trace["stages"], key=lambda each: -each["duration_seconds"])
    block: dict[str, Column] = {">block": "id", "name": "name", "kind": "kind", ">size": "size_bytes"}
    copy: dict[str, Column] = {"copy": lambda each: "clean" if each["clean"] else "dirty"}
    used: dict[str, Column] = {">active": "active_fraction", **copy, "used by stages": _uses}
    idle: dict[str, Column] = {">longest idle": "longest_idle_seconds", ">idle in all": "idle_seconds", **copy}
    idlest = [each for each in trace["blocks"] if each["movable"] and each["size_bytes"] and each["longest_idle_seconds"]]
    idlest.sort(key=lambda each: -each["size_bytes"] * each["longest_idle_seconds"])
    return (
        Table(title="longest stages", columns={**stage, **size}, rows=stages, most=rows),
        Table(title="largest blocks", columns={**block, **used}, rows=trace["blocks"], most=rows),
        Table(title="idlest blocks (size x longest inactive period)", columns={**block, **idle}, rows=idlest, most=rows),
    )


def _uses(block: Data, most: int = 6) -> str:
    stages = sorted({*block["reads"], *block["writes"]})
    listed = ", ".join(str(stage) for stage in stages[:most])
    return listed if len(stages) <= most else f"{listed}, … ({len(stages)})"
