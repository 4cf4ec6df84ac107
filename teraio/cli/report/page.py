"""A report as one HTML page that loads nothing: tables here, charts by `charts.js` and `report.js` from its data."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources

from planner.simulator import STAGES
from teraio.cli.report.content import Report, TraceFacts
from teraio.cli.report.markup import bar, section, table, text
from teraio.cli.tables import exact_bytes, format_bytes, format_seconds, share

__all__ = ["html_page"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""What the page may load: nothing."""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{css}</style>
</head>
<body>
<main>
{body}
</main>
<script type="application/json" id="report-data">{data}</script>
<script>
{js}</script>
</body>
</html>
"""

_MEMORY = """<section id="memory"><h2>Device memory over the iteration</h2>
<p class="faint">Predicted by the simulator. Time has the same scale in both charts, memory has not: the dashed line is the
budget in both.</p>
<ul class="legend">{legend}</ul>
<div id="memory-charts"></div></section>"""

_TIMELINE = """<section id="timeline"><h2>What happens when</h2>
<p class="faint">Predicted by the simulator: one iteration of the steady state. Point at something, or choose a lane (Tab) and
use the arrow keys; + and - zoom, Escape shows all. Drag to move.</p>
<div class="tools" role="toolbar" aria-label="Window of time">
<button type="button" id="zoom-in" aria-label="Zoom in">+</button>
<button type="button" id="zoom-out" aria-label="Zoom out">−</button>
<button type="button" id="earlier" aria-label="Earlier">◀</button>
<button type="button" id="later" aria-label="Later">▶</button>
<button type="button" id="all">All</button>
<span class="faint" id="window"></span></div>
<ul class="legend">{legend}</ul>
<div id="lanes"></div>
<div id="details" role="status" aria-live="polite"></div></section>
<noscript><p>The charts need JavaScript. The tables do not.</p></noscript>"""


def html_page(report: Report) -> str:
    """Return the page. Names from files are shown as text, whatever they contain."""
    name = report.facts.name if report.facts is not None else report.trace_fingerprint
    sections = [
        f"<h1>Plan for {text(name)}</h1>",
        _origin(report),
        _tiles(report),
        *(_of_trace(report, report.facts) if report.facts is not None else [_without_trace()]),
        _sweep(report),
        _policies(report),
        _measured(report),
    ]
    room = resources.files("teraio.cli.report")
    return _PAGE.format(
        policy=_POLICY,
        title=f"Plan for {text(name)}",
        css=room.joinpath("report.css").read_text("utf-8"),
        js="\n".join(room.joinpath(name).read_text("utf-8") for name in ("basics.js", "charts.js", "report.js")),
        body="\n".join(section for section in sections if section),
        data=report.model_dump_json().replace("<", "\\u003c"),
    )


def _origin(report: Report) -> str:
    facts = report.facts
    hardware = "" if facts is None else f" Hardware: {text(facts.hardware)}."
    made = "" if facts is None or not facts.created_by else f" The trace was made by {text(facts.created_by)}."
    return f'<p class="faint">Policy {text(report.policy)}.{hardware}{made}</p>'


def _tiles(report: Report) -> str:
    predicted, facts = report.predicted, report.facts
    tiles = [("device budget", format_bytes(report.budgets.device_bytes))]
    if facts is not None:
        tiles.append(("needed if nothing moves", format_bytes(facts.peak_bytes)))
        tiles.append(("smallest budget", format_bytes(facts.floor_bytes)))
    tiles += [("host budget", _limit(report.budgets.host_bytes)), ("storage budget", _limit(report.budgets.storage_bytes))]
    if predicted is not None:
        tiles += [
            ("iteration (predicted)", format_seconds(predicted.iteration_seconds)),
            ("without waiting", format_seconds(predicted.ideal_seconds)),
            (
                "no plan is faster than",
                format_seconds(predicted.lower_bound_seconds) if predicted.lower_bound_seconds else "unknown",
            ),
            (
                "waits",
                f"{format_seconds(predicted.stall_seconds)}, {share(predicted.stall_seconds, predicted.iteration_seconds)}",
            ),
            ("moved", format_bytes(sum(predicted.moved_bytes.values()))),
            ("written to drives", format_bytes(predicted.storage_written_bytes)),
        ]
    tiles.append(("moves", f"{report.moves:,}, by {report.blocks_moved:,} blocks"))
    if report.reruns:
        tiles.append(("stages run again", str(report.reruns)))
    if report.host_updates:
        tiles.append(("updates on the host", str(report.host_updates)))
    entries = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in tiles)
    return f'<dl class="tiles">{entries}</dl>'


def _limit(size_bytes: int | None) -> str:
    return "no limit" if size_bytes is None else format_bytes(size_bytes)


def _without_trace() -> str:
    return "<p>Give the trace (--trace) to see memory, copies, stalls and idle blocks.</p>"


def _of_trace(report: Report, facts: TraceFacts) -> list[str]:
    rows = facts.timeline
    kinds = dict.fromkeys((*rows.unplanned.kinds, *rows.memory.kinds))
    looks = [(stage.phase, stage.phase) for stage in rows.stages]
    shown = dict.fromkeys([*looks, ("stall", "stall"), ("out", "copy out"), ("in", "copy in")])
    return [
        _MEMORY.format(legend=_legend((kind, kind.replace("_", " ")) for kind in kinds)),
        _TIMELINE.format(legend=_legend(shown)),
        _critical(facts),
        _links(report, facts),
        _stalls(facts),
        _idle(facts),
    ]


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    return "".join(f'<li><i class="{look}"></i>{text(name)}</li>' for look, name in entries)


def _critical(facts: TraceFacts) -> str:
    whole = sum(facts.critical.values())
    rows = [
        ["computing" if resource == STAGES else _link(resource), format_seconds(time), share(time, whole), bar(time, whole)]
        for resource, time in facts.critical.items()
    ]
    told = "The iteration takes as long as these, one after another. To make it shorter, one of them must get shorter."
    return section("critical", "What holds it up", told, ["on", ">time", ">share", ""], rows)


def _links(report: Report, facts: TraceFacts) -> str:
    seconds = facts.timeline.seconds
    rows = [
        [
            _link(link.link),
            str(link.transfers),
            format_bytes(link.size_bytes),
            format_seconds(link.busy_seconds),
            share(link.busy_seconds, seconds),
        ]
        for link in facts.links
    ]
    return section("links", "Links", "Predicted, for one iteration.", ["link", ">copies", ">bytes", ">busy", ">share"], rows)


def _link(name: str) -> str:
    return text(name).replace("-&gt;", " → ")


def _stalls(facts: TraceFacts) -> str:
    if not facts.stalls:
        return '<section id="stalls"><h2>Stalls</h2><p>No stage waits.</p></section>'
    rows = [[str(stall.stage), text(stall.name), format_seconds(stall.stall_seconds)] for stall in facts.stalls]
    told = f"Stages that wait for a copy or for room, the longest first: {len(rows)} of {facts.stall_count}."
    return section("stalls", "Stalls", told, [">stage", "name", ">waits"], rows)


def _idle(facts: TraceFacts) -> str:
    rows = [
        [
            str(block.block),
            text(block.name),
            text(block.kind.replace("_", " ")),
            format_bytes(block.size_bytes),
            format_seconds(block.longest_idle_seconds),
            format_seconds(block.idle_seconds),
            "made anew" if block.remade else _leaves(block.moves),
        ]
        for block in facts.idle
    ]
    told = f"By size and longest idle time, in an iteration that never waits: {len(rows)} of {facts.idle_count}."
    columns = [">block", "name", "kind", ">size", ">longest idle", ">idle in all", "with the plan"]
    return section("idle", "Idlest blocks", told, columns, rows)


def _leaves(moves: int) -> str:
    return ("stays", "leaves once")[moves] if moves < 2 else f"leaves {moves} times"


def _sweep(report: Report) -> str:
    sweep = report.sweep
    if sweep is None:
        return ""
    rows = []
    for point in sweep.points:
        predicted = point.predicted
        if predicted is None:
            rows.append([exact_bytes(point.device_bytes), "no plan", "", "", f'<span class="faint">{text(point.error)}</span>'])
            continue
        over = f"{predicted.iteration_seconds / sweep.ideal_seconds - 1:.1%}" if sweep.ideal_seconds else ""
        smaller = point.planned_for_bytes is not None and point.planned_for_bytes < point.device_bytes
        note = f"the plan for {format_bytes(point.planned_for_bytes or 0)}" if smaller else ""
        cells = [format_seconds(predicted.iteration_seconds), over, format_seconds(predicted.stall_seconds), note]
        rows.append([exact_bytes(point.device_bytes), *cells])
    told = (
        f"Predicted, each budget planned anew with the policy {text(sweep.policy)}. Dotted: without waiting. Shaded: no plan. "
        "The ring is this plan."
    )
    shown = table([">device budget", ">iteration", ">over the ideal", ">waits", "note"], rows)
    return f"""<section id="sweep"><h2>Time against budget</h2><p class="faint">{told}</p>
<div id="sweep-chart"></div>{shown}</section>"""


def _policies(report: Report) -> str:
    comparison = report.comparison
    if comparison is None:
        return ""
    slowest = max((v.predicted.iteration_seconds for v in comparison.verdicts if v.predicted is not None), default=0.0)
    rows = []
    for verdict in comparison.verdicts:
        predicted = verdict.predicted
        if predicted is None:
            rows.append([text(verdict.policy), "no plan", "", "", "", f'<span class="faint">{text(verdict.error)}</span>'])
            continue
        bound = comparison.lower_bound_seconds
        over = f"{predicted.iteration_seconds / bound - 1:.1%}" if bound else ""
        cells = [format_seconds(predicted.stall_seconds), format_bytes(predicted.storage_written_bytes)]
        length = bar(predicted.iteration_seconds, slowest)
        rows.append([text(verdict.policy), format_seconds(predicted.iteration_seconds), over, *cells, length])
    told = "Predicted, all under the budgets of this plan."
    columns = ["policy", ">iteration", ">over the bound", ">waits", ">written to drives", ""]
    return section("policies", "Policies compared", told, columns, rows)


def _measured(report: Report) -> str:
    run, predicted = report.measured, report.predicted
    if run is None:
        return ""
    if not run.planned:
        told = f"None of the {run.iterations} iterations of the run followed a plan, so that none can stand beside this one."
        return f'<section id="measured"><h2>Predicted and measured</h2><p>{told}</p></section>'
    rows = [
        ["iteration", _seconds(predicted.iteration_seconds if predicted else None), _seconds(run.seconds)],
        ["waits", _seconds(predicted.stall_seconds if predicted else None), _seconds(run.waited_seconds)],
        ["re-runs", _seconds(predicted.recompute_seconds if predicted else None), _seconds(run.recompute_seconds)],
    ]
    busy = {link.link: link.busy_seconds for link in report.facts.links} if report.facts is not None else {}
    for link, size in run.moved_bytes.items():
        moved = format_bytes(predicted.moved_bytes.get(link, 0)) if predicted else ""
        rows.append([f"{_link(link)}, bytes", moved, format_bytes(size)])
        rows.append([f"{_link(link)}, busy", _seconds(busy.get(link)), _seconds(run.busy_seconds.get(link))])
    told = f"Measured: medians over {run.planned} planned iterations of {run.iterations}."
    seconds = run.predicted_seconds
    if predicted and seconds is not None and abs(seconds - predicted.iteration_seconds) > 0.01 * predicted.iteration_seconds:
        told += f" The run follows another plan by now: that one predicts {format_seconds(seconds)} for an iteration."
    return section("measured", "Predicted and measured", told, ["on", ">predicted", ">measured"], rows)


def _seconds(value: float | None) -> str:
    return "" if value is None else format_seconds(value)
