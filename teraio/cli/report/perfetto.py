"""A plan's iteration as a timeline that ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from teraio.cli.output import Data

_MICROSECONDS = 1e6
_STAGES, _STALLS, _UPDATES = "compute", "stalls", "updates on the host"


def chrome_trace(facts: Data) -> dict[str, Any]:
    """Return the events of one iteration: a named thread for each lane, counters of the memory of each tier, and flows.

    A flow leads from the stage after which a block leaves to its copy out, on to its copy in, and to the stage that needs it.
    """
    rows = facts["timeline"]
    lanes = (_STAGES, _STALLS, *rows["links"], _UPDATES)
    numbers = {lane: number for number, lane in enumerate(lanes, 1)}
    events: list[dict[str, Any]] = [_named("process_name", 0, f"plan of {facts['name']} (predicted)")]
    for lane, number in numbers.items():
        events.append(_named("thread_name", number, lane))
        events.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}})
    for stage in rows["stages"]:
        told = {name: stage[name] for name in ("phase", "layer", "used_bytes", "workspace_bytes")}
        waited = {"waited_seconds": stage["start"] - stage["reached"], "waits_for": stage["waits_for"]}
        events.append(_span(stage["name"], stage["phase"], numbers[_STAGES], stage, told | waited))
        if stage["start"] > stage["reached"]:
            stall = {"stage": stage["name"], "until": stage["waits_for"]}
            events.append(_span("stall", "stall", numbers[_STALLS], {"start": stage["reached"], "end": stage["start"]}, stall))
    for copy in rows["copies"]:
        block, move = facts["blocks"][copy["block"]], rows["moves"][copy["move"]]
        told = {"block": copy["block"], "kind": block["kind"], "size_bytes": block["size_bytes"], "why": move["why"]}
        events.append(_span(block["name"], "copy", numbers[copy["link"]], copy, told))
    for update in rows["updates"]:
        events.append(_span(update["name"], "update", numbers[_UPDATES], update, {"subgroup": update["subgroup"]}))
    for number, (source, target) in enumerate(_flows(rows)):
        events += _flow(number, (numbers[source[0]], source[1]), (numbers[target[0]], target[1]))
    for tier, memory in {"device": rows["memory"], **rows["below"]}.items():
        for seconds, *sizes in memory["points"]:
            held = dict(zip(memory["kinds"], sizes, strict=True))
            events.append({"ph": "C", "pid": 1, "name": f"{tier} memory", "ts": seconds * _MICROSECONDS, "args": held})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": thread, "name": what, "args": {"name": name}}


def _span(name: str, category: str, thread: int, times: Data, told: Mapping[str, object]) -> dict[str, Any]:
    """A complete event. A copy that began in the iteration before has a negative time, as in the simulator."""
    begin, length = times["start"] * _MICROSECONDS, (times["end"] - times["start"]) * _MICROSECONDS
    return {"ph": "X", "pid": 1, "tid": thread, "name": name, "cat": category, "ts": begin, "dur": length, "args": dict(told)}


_Event = tuple[str, Data]  # a lane, and what has a start and an end there


def _flows(rows: Data) -> Iterator[tuple[_Event, _Event]]:
    """Yield what leads to what, where that is later in the same iteration."""
    copies: dict[int, dict[str, _Event]] = {}
    for copy in rows["copies"]:
        copies.setdefault(copy["move"], {})["out" if copy["link"].startswith("device->") else "in"] = (copy["link"], copy)
    for number, found in copies.items():
        move = rows["moves"][number]
        stages = [(_STAGES, rows["stages"][move[name] % len(rows["stages"])]) for name in ("after", "before")]
        chain = [stages[0], *(found[way] for way in ("out", "in") if way in found), *(stages[1:] if "in" in found else [])]
        for source, target in zip(chain, chain[1:], strict=False):
            if source[1]["end"] <= target[1]["start"]:
                yield source, target


def _flow(number: int, source: tuple[int, Data], target: tuple[int, Data]) -> list[dict[str, Any]]:
    """An arrow. Its ends are bound to the spans that they are in, so that they stand in the middle of these."""
    told = {"pid": 1, "id": number, "name": "block", "cat": "flow"}
    ends = [(thread, (times["start"] + times["end"]) / 2 * _MICROSECONDS) for thread, times in (source, target)]
    (tid, begin), (to, end) = ends
    return [{**told, "ph": "s", "tid": tid, "ts": begin}, {**told, "ph": "f", "bp": "e", "tid": to, "ts": end}]
