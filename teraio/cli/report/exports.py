"""A plan's iteration in other forms: a timeline that ui.perfetto.dev and chrome://tracing open, and a picture."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from planner.errors import OptionsError
from teraio.cli.output import Data
from teraio.cli.report.palette import KINDS, PHASES, STALL

_MICROSECONDS = 1e6
_STAGES, _STALLS, _UPDATES = "compute", "stalls", "updates on the host"
_GIB = 1 << 30


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


def draw(facts: Data, path: str | os.PathLike[str]) -> None:
    """Write a picture of the memory without and with the plan, and of the lanes. Raises OptionsError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise OptionsError(f"option --png needs matplotlib ({error}); pip install matplotlib") from error
    rows = facts["timeline"]
    figure = Figure(figsize=(12, 9), layout="constrained")
    FigureCanvasAgg(figure)
    without, planned, lanes = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": (2, 2, 1.5)})
    figure.suptitle(f"plan for {facts['name']} (predicted)")
    for axes, memory, name in ((without, rows["unplanned"], "nothing moves"), (planned, rows["memory"], "with the plan")):
        _stack(axes, memory, rows["budget_bytes"], name)
        _legend(axes, [Patch(color=KINDS[kind][0], label=kind.replace("_", " ")) for kind in reversed(memory["kinds"])])
    _lanes(lanes, facts)
    shown = {stage["phase"] for stage in rows["stages"]}
    looks = {phase: colours for phase, colours in PHASES.items() if phase in shown} | STALL
    _legend(lanes, [Patch(color=colours[0], label=name) for name, colours in looks.items()])
    figure.savefig(path, format="png", dpi=120)


def _legend(axes: Any, handles: list[Any]) -> None:
    """Put a legend beside the data."""
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)


def _stack(axes: Any, memory: Data, budget_bytes: int, name: str) -> None:
    times = [*(point[0] for point in memory["points"]), memory["seconds"]]
    columns = [[point[column] / _GIB for point in memory["points"]] for column in range(1, len(memory["kinds"]) + 1)]
    sizes = [[*column, column[-1]] for column in columns]
    axes.stackplot(times, sizes, step="post", colors=[KINDS[kind][0] for kind in memory["kinds"]])
    axes.axhline(budget_bytes / _GIB, color="black", linestyle="--", linewidth=1)
    axes.set_title(f"device memory, {name} (dashed: the budget)", fontsize="medium")
    axes.set_ylabel("GiB")


def _lanes(axes: Any, facts: Data) -> None:
    rows, blocks = facts["timeline"], facts["blocks"]
    names = [_STAGES, *rows["links"], *([_UPDATES] if rows["updates"] else [])]
    for phase, colours in PHASES.items():
        _bars(axes, 0, ((stage["start"], stage["end"]) for stage in rows["stages"] if stage["phase"] == phase), colours[0])
    _bars(axes, 0, ((stage["reached"], stage["start"]) for stage in rows["stages"]), STALL["stall"][0])
    for lane, link in enumerate(rows["links"], 1):
        for kind, colours in KINDS.items():
            of = [copy for copy in rows["copies"] if copy["link"] == link and blocks[copy["block"]]["kind"] == kind]
            _bars(axes, lane, ((copy["start"], copy["end"]) for copy in of), colours[0])
    _bars(axes, len(names) - 1, ((update["start"], update["end"]) for update in rows["updates"]), PHASES["optimizer"][0])
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, max(rows["seconds"], rows["unplanned"]["seconds"]))
    axes.set_xlabel("seconds (copies: the colours of their blocks' kinds)")


def _bars(axes: Any, lane: int, spans: Iterable[tuple[float, float]], colour: str) -> None:
    axes.broken_barh([(start, end - start) for start, end in spans if end > start], (lane - 0.4, 0.8), color=colour)
