"""A report as one HTML page that loads nothing: `page.html`, filled with tables here, with charts and long tables by `*.js`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from planner.schema import printable
from planner.simulator import STAGES
from teraio.cli import output
from teraio.cli.advice import what_holds_up
from teraio.cli.lengths import lengths_table
from teraio.cli.output import Column, Data, Table, exact_bytes, format_bytes, format_seconds, share
from teraio.cli.plan_summary import links_table, sweep_table
from teraio.cli.report.content import KINDS, PHASES, STALL, style


class _Html(str):
    """Text that is HTML already. All other text is shown as it is, whatever it contains."""


def html_page(report: Data) -> str:
    """Return the page. Names from files are shown as text, whatever they contain."""
    facts = report["facts"]
    title = f"Plan for {_text(facts['name'])}"
    rows = facts["timeline"]
    phases = {stage["phase"] for stage in rows["stages"]} | ({"optimizer"} if rows["updates"] else set())
    kinds = {kind for memory in (rows["unplanned"], rows["memory"]) for kind in memory["kinds"]}
    room = resources.files("teraio.cli.report")
    page = room.joinpath("page.html").read_text("utf-8")
    return page.format(
        title=title,
        css=style() + room.joinpath("report.css").read_text("utf-8"),
        js="\n".join(room.joinpath(name).read_text("utf-8") for name in ("charts.js", "tables.js", "report.js")),
        verdict=_verdict(report),
        cards=_cards(report),
        kinds=_legend(kind for kind in KINDS if kind in kinds),
        phases=_legend([*(phase for phase in PHASES if phase in phases), *STALL]),
        critical=_critical(facts["critical"]),
        links=_section("links", "Links", "Predicted, for one iteration.", links_table(facts["links"], rows["seconds"])),
        lengths=_lengths(report["lengths"]),
        sweep=_sweep(report["sweep"]),
        origin=_origin(report),
        # A name in the data must not end the script: no "<" of it is one of HTML.
        data=json.dumps(report, separators=(",", ":")).replace("<", "\\u003c"),
    )


def _text(value: str) -> str:
    return value if isinstance(value, _Html) else escape(printable(value))


def _section(name: str, title: str, told: str, table: Table, above: str = "") -> str:
    """Return a part of the page with a table. told: text; above: HTML that stands above the table."""
    head, classes = [], []
    for column in table.columns:
        label = column.lstrip(">")
        look = "number" if column.startswith(">") else label if label in ("link", "name", "note", "on") else ""
        classes.append(look)
        head.append(f'<th scope="col" class="{look}">{_text(label)}</th>')
    body = "\n".join(
        "<tr>" + "".join(map(_cell, classes, (output.cell(row, column) for column in table.columns.values()))) + "</tr>"
        for row in table.rows
    )
    shown = f"<table><thead><tr>{''.join(head)}</tr></thead><tbody>\n{body}</tbody></table>"
    return (
        f'<section id="{name}"><h2>{title}</h2><p class="faint">{_text(told)}</p>{above}'
        f'<div class="scroll" tabindex="0">{shown}</div></section>'
    )


def _cell(look: str, value: str) -> str:
    shown = _text(value)
    return f'<td class="{look}">{shown.replace("-&gt;", " → ") if look in ("link", "on") else shown}</td>'


def _bar(part: float, whole: float) -> _Html:
    """Return a bar as long as a share of the whole."""
    return _Html(f'<meter-bar><i style="width:{100 * part / whole if whole else 0:.1f}%"></i></meter-bar>')


def _origin(report: Data) -> str:
    facts = report["facts"]
    told = f"Policy {report['policy']}. Hardware: {facts['hardware']}."
    told += f" In tiles: {facts['tiles']['words']}." if facts["tiles"]["words"] else ""
    told += f" The trace was made by {facts['created_by']}." if facts["created_by"] else ""
    return f'<p class="faint">{_text(told)}</p>'


_HARDLY = 0.005  # share of the bound that is not worth a word


def _verdict(report: Data) -> str:
    """Return the time of an iteration, and a sentence: how far it is from the best, in what it fits, what holds it up."""
    predicted, facts = report["predicted"], report["facts"]
    if predicted is None:
        return ""
    seconds, bound = predicted["iteration_seconds"], predicted["lower_bound_seconds"]
    told = []
    if bound:
        above = seconds / bound - 1
        close = "as fast as any plan can be"
        told.append(close if above < _HARDLY else f"{above:.0%} above {format_seconds(bound)}, which no plan can beat")
    device, peak, holds_up = report["budgets"]["device_bytes"], facts["peak_bytes"], what_holds_up(facts["critical"])
    fits = f"{format_bytes(device)} of the {format_bytes(peak)} that it needs" if device < peak else format_bytes(peak)
    told += [f"fits in {fits}", f"held up by {holds_up.replace('->', ' → ') or 'nothing but computation'}"]
    sentence = "; ".join(told)
    return f'<p class="verdict"><b>{format_seconds(seconds)}</b> an iteration (predicted): {_text(sentence)}.</p>'


def _cards(report: Data) -> str:
    """Return six cards: a figure under its name, and what belongs to it. The last: rates, or the bound where they are not known.

    A plan without a prediction has two.
    """
    predicted, facts, budgets = report["predicted"], report["facts"], report["budgets"]
    needs = f"{format_bytes(facts['floor_bytes'])} at least, {format_bytes(facts['peak_bytes'])} if nothing moves"
    limits = {tier: budgets[f"{tier}_bytes"] for tier in ("host", "storage")}
    below = ", ".join(f"{tier} {'no limit' if size is None else output.in_asked_unit(size)}" for tier, size in limits.items())
    below = f"budgets: {below}" + (f"; on the host: {report['host_updates']} of the updates" if report["host_updates"] else "")
    cards = {"device budget": (output.in_asked_unit(budgets["device_bytes"]), needs)}
    if predicted is None:
        cards["moves"] = (f"{report['moves']:,}", below)
    else:
        seconds, waits = predicted["iteration_seconds"], predicted["stall_seconds"]
        again = f"re-runs: {report['reruns']}, which take {format_seconds(predicted.get('recompute_seconds', 0.0))}"
        moves = f"{report['moves']:,} moves, by {report['blocks_moved']:,} blocks"
        written = f"{format_bytes(predicted['storage_written_bytes'])} written to drives"
        cards |= {
            "without waiting": (format_seconds(predicted["ideal_seconds"]), again if report["reruns"] else ""),
            "waits": (format_seconds(waits), f"{share(waits, seconds)} of the iteration"),
            "moved": (format_bytes(sum(predicted["moved_bytes"].values())), f"{moves}; {written}"),
            "below the device": (format_bytes(sum(predicted["peak_bytes"].get(tier, 0) for tier in limits)), below),
        }
        done = list(output.rates(seconds, facts["work"]).items())
        bound = predicted["lower_bound_seconds"]
        name, figure = done[0] if done else ("no plan is faster than", format_seconds(bound) if bound else "not known")
        cards[name] = (figure, ", ".join(f"{other} {what}" for what, other in done[1:]))
    entries = "".join(
        f'<div><dt>{_text(name)}</dt><dd>{_text(figure)}</dd><dd class="faint">{_text(beneath)}</dd></div>'
        for name, (figure, beneath) in cards.items()
    )
    return f'<dl class="cards" tabindex="0">{entries}</dl>'


def _legend(looks: Iterable[str]) -> str:
    return "".join(f'<li><i class="{look}"></i>{look.replace("_", " ")}</li>' for look in looks)


def _critical(critical: Data) -> str:
    whole = sum(critical.values())
    told = "The iteration takes as long as these, one after another. To make it shorter, one of them must get shorter."
    columns: dict[str, Column] = {
        "on": lambda row: "compute" if row["on"] == STAGES else row["on"],
        ">time": "seconds",
        ">share": lambda row: share(row["seconds"], whole),
        "": lambda row: _bar(row["seconds"], whole),
    }
    rows = [{"on": resource, "seconds": seconds} for resource, seconds in critical.items()]
    return _section("critical", "What holds it up", told, Table(columns=columns, rows=rows))


def _lengths(rows: Sequence[Data]) -> str:
    if not rows:
        return ""
    table, slowest = lengths_table(rows), max(row["predicted"]["iteration_seconds"] for row in rows)
    columns = {**table.columns, "": lambda row: _bar(row["predicted"]["iteration_seconds"], slowest)}
    told = "Predicted. The plan is for the longest inputs; shorter ones move less."
    return _section("lengths", "Time against length", told, Table(columns=columns, rows=rows))


def _sweep(sweep: Data | None) -> str:
    if sweep is None:
        return ""
    told = (
        f"Predicted, each budget planned anew with the policy {sweep['policy']}. Dotted: without waiting. "
        "Shaded: there is no plan, as below the floor. The ring is this plan."
    )
    table = sweep_table(sweep)
    columns = {
        **table.columns,
        ">device budget": lambda point: exact_bytes(point["device_bytes"]),
        ">iteration": lambda point: output.cell(point, "predicted.iteration_seconds") or "no plan",
    }
    chart = '<div id="sweep-chart"></div>'
    return _section("sweep", "Time against budget", told, Table(columns=columns, rows=table.rows), above=chart)
