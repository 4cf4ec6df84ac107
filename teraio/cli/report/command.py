"""The command `teraio report`.

A plan's iteration in other forms: as a timeline that ui.perfetto.dev and chrome://tracing open, and as a picture.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

import planner
from planner.errors import OptionsError
from planner.policies import POLICIES
from planner.problem import SolverSettings, live_bytes
from planner.schema import Plan, Trace
from teraio.cli.arguments import AsJson, PlanFile
from teraio.cli.comparison import compare_policies, sweep_budgets
from teraio.cli.output import Data, working, write_file, write_out
from teraio.cli.report.content import measured_run, report_of
from teraio.cli.report.page import html_page
from teraio.options import require_directory

_COMPARED = ("ilp", "offload-only", "teraio", "g10", "zero-infinity", "belady")

_BELOW_FLOOR = 0.8  # where a sweep begins, as a share of the smallest budget that works: it shows that there is no plan below


def report(
    plan: PlanFile,
    trace: Annotated[Path | None, typer.Option(help="The trace of the plan. Most of the report needs it.")] = None,
    measured: Annotated[Path | None, typer.Option(help="What a run measured: its iterations as lines of JSON.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the page (HTML).")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Where to write the timeline for ui.perfetto.dev (JSON).")] = None,
    png: Annotated[Path | None, typer.Option(help="Where to write a picture (PNG). Needs matplotlib.")] = None,
    points: Annotated[int, typer.Option(min=0, max=100, help="Device budgets to plan for the sweep; 0 for no sweep.")] = 8,
    compare: Annotated[bool, typer.Option(help="Plan with other policies, to compare them.")] = True,
    as_json: AsJson = False,
    *,
    settings: SolverSettings,
) -> None:
    """Show PLAN as one page.

    Memory, every copy and why, stalls, idle blocks, time against budget and policies, which are planned anew.
    """
    outputs = {"--output": output, "--perfetto": perfetto, "--png": png}
    _check(outputs, trace, as_json=as_json)
    decided = Plan.load(plan)
    loaded = None if trace is None else Trace.load(trace)
    needed = as_json or output is not None
    made = report_of(
        decided,
        loaded,
        sweep=_sweep(decided, loaded, points, settings) if loaded is not None and points and needed else None,
        comparison=_comparison(decided, loaded, settings) if loaded is not None and compare and needed else None,
        measured=None if measured is None else measured_run(measured),
    )
    _write(made, output, perfetto, png)
    if as_json:
        write_out(json.dumps(made, indent=1))
    for path in outputs.values():
        if path is not None and not as_json:
            write_out(f"written: {path}")


def _check(outputs: dict[str, Path | None], trace: Path | None, *, as_json: bool) -> None:
    """Raise OptionsError if nothing is to be written, or if that cannot work."""
    if not as_json and all(path is None for path in outputs.values()):
        raise planner.OptionsError("report: found no place to write to, wanted --output, --perfetto, --png or --json")
    for option, path in outputs.items():
        if path is None:
            continue
        require_directory(option, path.parent)
        if option != "--output" and trace is None:
            raise planner.OptionsError(f"option {option}: a timeline needs the trace of the plan; give --trace")


def _write(made: Data, output: Path | None, perfetto: Path | None, png: Path | None) -> None:
    if output is not None:
        write_file(output, html_page(made))
    facts = made["facts"]
    if facts is None:
        return
    if perfetto is not None:
        write_file(perfetto, json.dumps(chrome_trace(facts["name"], facts["timeline"])))
    if png is not None:
        draw(f"plan for {facts['name']} (predicted)", facts["timeline"], png)


def _sweep(plan: Plan, trace: Trace, points: int, settings: SolverSettings) -> Data:
    lowest = int(_BELOW_FLOOR * planner.floor(trace)[0])
    highest = max(*live_bytes(trace), plan.budgets.device_bytes)
    sizes = {lowest + (highest - lowest) * number // max(points - 1, 1) for number in range(points)}
    policy = plan.policy if plan.policy in POLICIES else "ilp"
    with working("planning") as progress:
        return sweep_budgets(
            trace, sorted(sizes | {plan.budgets.device_bytes}), plan.budgets, policy, settings=settings, progress=progress
        )


def _comparison(plan: Plan, trace: Trace, settings: SolverSettings) -> Data:
    with working("planning") as progress:
        return compare_policies(trace, plan.budgets, _COMPARED, settings=settings, progress=progress)


_MICROSECONDS = 1e6
_STAGES, _RECOMPUTE, _STALLS, _UPDATES = "compute", "recompute", "stalls", "updates on the host"
_COLOURS = {
    "parameter": "#0072b2",
    "gradient": "#e69f00",
    "optimizer_state": "#009e73",
    "activation": "#cc79a7",
    "buffer": "#8c8c8c",
    "workspace": "#56b4e9",
}
_PHASES = {"forward": "#0072b2", "backward": "#cc79a7", "optimizer": "#009e73", "user": "#8c8c8c", "recompute": "#e69f00"}
_STALL = "#d55e00"
_GIB = 1 << 30


def chrome_trace(name: str, rows: Data) -> dict[str, Any]:
    """Return the events of one iteration, with a named thread for each lane and counters of the device's memory."""
    lanes = (_STAGES, _RECOMPUTE, _STALLS, *rows["links"], _UPDATES)
    numbers = {lane: number for number, lane in enumerate(lanes, 1)}
    events: list[dict[str, Any]] = [_named("process_name", 0, f"plan of {name} (predicted)")]
    for lane, number in numbers.items():
        events.append(_named("thread_name", number, lane))
        events.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}})
    for stage in rows["stages"]:
        lane = _RECOMPUTE if stage["phase"] == "recompute" else _STAGES
        events.append(_span(stage["name"], stage["phase"], numbers[lane], stage["start"], stage["end"]))
        if stage["start"] > stage["reached"]:
            stall = {"stage": stage["name"], "until": stage["waits_for"]}
            events.append(_span("stall", "stall", numbers[_STALLS], stage["reached"], stage["start"], stall))
    for copy in rows["copies"]:
        told = {"block": copy["block"], "kind": copy["kind"], "size_bytes": copy["size_bytes"], "why": copy["why"]}
        events.append(_span(copy["name"], "copy", numbers[copy["link"]], copy["start"], copy["end"], told))
    for update in rows["updates"]:
        events.append(_span(update["name"], "update", numbers[_UPDATES], update["start"], update["end"]))
    for seconds, *sizes in rows["memory"]["points"]:
        held = dict(zip(rows["memory"]["kinds"], sizes, strict=True))
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


def draw(title: str, rows: Data, path: str | os.PathLike[str]) -> None:
    """Write a picture of the memory without and with the plan, and of the lanes. Raises OptionsError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionsError(f"option --png needs matplotlib ({error}); install it: pip install 'teraio[plot]'") from error
    figure = Figure(figsize=(12, 9), layout="constrained")
    FigureCanvasAgg(figure)
    without, planned, lanes = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": (2, 2, 1.5)})
    figure.suptitle(title)
    for axes, memory, name in ((without, rows["unplanned"], "nothing moves"), (planned, rows["memory"], "with the plan")):
        _stack(axes, memory, rows["budget_bytes"], name)
    planned.legend(loc="upper left", fontsize="small", ncols=4)
    _lanes(lanes, rows)
    figure.savefig(path, format="png", dpi=120)


def _stack(axes: Any, memory: Data, budget_bytes: int, name: str) -> None:
    times = [*(point[0] for point in memory["points"]), memory["seconds"]]
    columns = [[point[column] / _GIB for point in memory["points"]] for column in range(1, len(memory["kinds"]) + 1)]
    sizes = [[*column, column[-1]] for column in columns]
    axes.stackplot(times, sizes, step="post", labels=memory["kinds"], colors=[_COLOURS[kind] for kind in memory["kinds"]])
    axes.axhline(budget_bytes / _GIB, color="black", linestyle="--", linewidth=1)
    axes.set_title(f"device memory, {name} (dashed: the budget)", fontsize="medium")
    axes.set_ylabel("GiB")


def _lanes(axes: Any, rows: Data) -> None:
    names = ["compute", *rows["links"], *(["updates on the host"] if rows["updates"] else [])]
    for phase, colour in _PHASES.items():
        _bars(axes, 0, ((stage["start"], stage["end"]) for stage in rows["stages"] if stage["phase"] == phase), colour)
    _bars(axes, 0, ((stage["reached"], stage["start"]) for stage in rows["stages"]), _STALL)
    for lane, link in enumerate(rows["links"], 1):
        _bars(axes, lane, ((copy["start"], copy["end"]) for copy in rows["copies"] if copy["link"] == link), "#56b4e9")
    _bars(axes, len(names) - 1, ((update["start"], update["end"]) for update in rows["updates"]), "#009e73")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, max(rows["seconds"], rows["unplanned"]["seconds"]))
    axes.set_xlabel("seconds (stalls are red)")


def _bars(axes: Any, lane: int, spans: Iterable[tuple[float, float]], colour: str) -> None:
    axes.broken_barh([(start, end - start) for start, end in spans if end > start], (lane - 0.4, 0.8), color=colour)
