"""A plan's iteration in the Chrome trace format, which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from teraio.cli.report.timeline import TimelineRows

__all__ = ["chrome_trace"]

_MICROSECONDS = 1e6
_STAGES, _RECOMPUTE, _STALLS, _UPDATES = "compute", "recompute", "stalls", "updates on the host"


def chrome_trace(name: str, rows: TimelineRows) -> dict[str, Any]:
    """Return the events of one iteration, with a named thread for each lane and counters of the device's memory."""
    lanes = (_STAGES, _RECOMPUTE, _STALLS, *rows.links, _UPDATES)
    numbers = {lane: number for number, lane in enumerate(lanes, 1)}
    events: list[dict[str, Any]] = [_named("process_name", 0, f"plan of {name} (predicted)")]
    for lane, number in numbers.items():
        events.append(_named("thread_name", number, lane))
        events.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}})
    for stage in rows.stages:
        lane = _RECOMPUTE if stage.phase == "recompute" else _STAGES
        events.append(_span(stage.name, stage.phase, numbers[lane], stage.start, stage.end))
        if stage.start > stage.reached:
            stall = {"stage": stage.name, "until": stage.waits_for}
            events.append(_span("stall", "stall", numbers[_STALLS], stage.reached, stage.start, stall))
    for copy in rows.copies:
        told = {"block": copy.block, "kind": copy.kind, "size_bytes": copy.size_bytes, "why": copy.why}
        events.append(_span(copy.name, "copy", numbers[copy.link], copy.start, copy.end, told))
    for update in rows.updates:
        events.append(_span(update.name, "update", numbers[_UPDATES], update.start, update.end))
    for seconds, *sizes in rows.memory.points:
        held = dict(zip(rows.memory.kinds, sizes, strict=True))
        events.append({"ph": "C", "pid": 1, "name": "device memory", "ts": seconds * _MICROSECONDS, "args": held})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": thread, "name": what, "args": {"name": name}}


def _span(
    name: str, category: str, thread: int, start: float, end: float, told: Mapping[str, object] | None = None
) -> dict[str, Any]:
    """A complete event. A copy that began in the iteration before has a negative time, as in the simulator."""
    times = {"ts": start * _MICROSECONDS, "dur": (end - start) * _MICROSECONDS}
    return {"ph": "X", "pid": 1, "tid": thread, "name": name, "cat": category, **times, "args": dict(told or {})}
