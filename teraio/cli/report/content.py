"""All that a report tells, as data: the page shows exactly this, and `--json` prints it. Also a timeline and a picture of it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import planner
from planner import Plan, Trace
from planner.errors import OptionsError
from planner.problem import layer_of, live_bytes, source_blocks
from planner.schema import Stage, Tier
from planner.simulator import Timeline
from teraio.cli.lengths import lengths_of_plan
from teraio.cli.output import Data, format_bytes
from teraio.cli.plan_summary import summarise_moves, summarise_plan
from teraio.cli.trace_summary import block_summaries, tiles_of

# The colours, in light and in dark, from the bottom of a stack to its top. Blocks have one palette and stages another: no colour
# has two meanings.
KINDS = {
    "parameter": ("#0072b2", "#3b9bdc"),
    "gradient": ("#e69f00", "#f0b429"),
    "optimizer_state": ("#009e73", "#2bbf93"),
    "activation": ("#cc79a7", "#d88fb8"),
    "buffer": ("#8c8c8c", "#9a9a9a"),
    "workspace": ("#56b4e9", "#8fd4f7"),
}
PHASES = {
    "forward": ("#5e4fa2", "#8f7de0"),
    "recompute": ("#b8a9e6", "#d3c6f2"),  # a forward stage that runs again
    "backward": ("#7f4f24", "#b07d4f"),
    "optimizer": ("#93ab1a", "#b5d334"),
    "user": ("#d9c8a0", "#6f6750"),
}
STALL = {"stall": ("#d7191c", "#ff4d3d")}


def style() -> str:
    """Return the colours as CSS: a class for each, with what it fills in one of the two."""
    colours = KINDS | PHASES | STALL
    light, dark = (" ".join(f"--{name}: {pair[shade]};" for name, pair in colours.items()) for shade in (0, 1))
    classes = "\n".join(f".{name} {{ fill: var(--{name}); background: var(--{name}); }}" for name in colours)
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{classes}\n"


def report_of(plan: Plan, trace: Trace, *, sweep: Data | None = None) -> Data:
    """Return the report of a plan: all of it is predicted. `facts`: what its trace tells.

    Raises PlanError if the plan does not belong to the trace, InfeasiblePlanError if it cannot be carried out.
    """
    return {
        **plan.model_dump(mode="json", include={"policy", "trace_fingerprint", "budgets", "predicted"}),
        "moves": len(plan.moves),
        "blocks_moved": len({move.block for move in plan.moves}),
        "host_updates": len(plan.on_host),
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

    `points`: a time, and the bytes of each of `kinds` from then on. `held`: a block, and from when to when it takes room; None if
    it still does when the iteration ends.
    """
    changes = [(seconds, block, size) for seconds, where, block, size in timeline.memory if where == tier]
    of = [trace.blocks[source].kind for source in sources]
    named = [(seconds, "workspace" if block is None else of[block], size) for seconds, block, size in changes]
    present = {kind for _, kind, _ in named}
    kinds = [kind for kind in KINDS if kind in present]
    held: list[list[float | None]] = []
    since: dict[int, float] = {}
    for seconds, block, size in changes:
        if block is None:
            continue
        if size > 0:
            since[block] = seconds
        else:
            held.append([sources[block], since.pop(block), seconds])
    held += [[sources[block], began, None] for block, began in since.items()]
    return {"kinds": kinds, "seconds": timeline.iteration_seconds, "points": list(_points(named, kinds)), "held": held}


def _points(changes: Sequence[tuple[float, str, int]], kinds: Sequence[str]) -> Iterable[list[float]]:
    """Yield the bytes of each kind after all changes of an instant."""
    held = dict.fromkeys(kinds, 0)
    for number, (seconds, kind, size) in enumerate(changes):
        held[kind] += size
        if number + 1 == len(changes) or changes[number + 1][0] > seconds:
            yield [seconds, *held.values()]


# -- the same in other forms: a timeline that ui.perfetto.dev and chrome://tracing open, and a picture

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


def require_matplotlib() -> None:
    """Raises OptionsError if no picture can be drawn."""
    try:
        import_module("matplotlib")
    except ImportError as error:
        raise OptionsError(f"option --png needs matplotlib ({error}); pip install matplotlib") from error


def draw(facts: Data, path: str | os.PathLike[str]) -> None:
    """Write a picture of the memory without and with the plan, and of the lanes. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

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
