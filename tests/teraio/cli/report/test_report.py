"""The report of a plan: its data are the simulator's, its page loads nothing, names from files are text."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import planner
from planner import Budgets, Plan
from planner.problem import live_bytes
from planner.simulator import critical_path, seconds_by_resource
from teraio.cli.report.content import KINDS, PHASES, STALL, style

from ....planner.traces import hand
from ...conftest import RunCommand
from ...traces import CHAIN, CHAIN_FILE, file_of, planned


class Page(HTMLParser):
    """Tags, texts by tag, and the data of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)

    @property
    def data(self) -> Any:
        return json.loads(self.texts["script"][0])


Report = Callable[..., str]


@pytest.fixture
def report(run: RunCommand) -> Report:
    """What `teraio report` prints."""

    def printed(*arguments: object) -> str:
        done = run("report", *arguments)
        assert done.code == 0, done.err
        return done.out

    return printed


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """A plan for 'chain' with 10 bytes."""
    return planned(tmp_path, "chain", 10)


@pytest.fixture
def page(chain: Path, report: Report, tmp_path: Path) -> Page:
    report(chain, "--trace", CHAIN_FILE, "-o", tmp_path / "report.html", "--points", 3)
    return Page((tmp_path / "report.html").read_text())


PLANNED = [
    ("chain", 10),
    ("wrap", 20),
    ("recompute", 50),
    ("host_update", 40),
    ("user_code", 15),
    ("gradient_outlives_update", 15),
]
"""Traces with budgets at which something moves, runs again, or updates on the host."""


def facts_of(report: Report, plan: Path, trace: Path) -> Any:
    return json.loads(report(plan, "--trace", trace, "--json", "--points", 0))["facts"]


@pytest.mark.parametrize(("name", "device_bytes"), PLANNED)
def test_the_timeline_is_that_of_the_simulator_and_blocks_make_up_the_memory_at_every_moment(
    name: str, device_bytes: int, report: Report, tmp_path: Path
) -> None:
    trace, path = hand(name), planned(tmp_path, name, device_bytes)
    facts, replayed = facts_of(report, path, file_of(name)), planner.simulate(trace, Plan.load(path))
    rows, blocks = facts["timeline"], facts["blocks"]
    assert rows["seconds"] == replayed.iteration_seconds
    assert [(s["reached"], s["start"], s["end"]) for s in rows["stages"]] == list(replayed.stages)
    copies = [(c["link"], c["block"], c["queued"], c["start"], c["end"]) for c in rows["copies"]]
    assert copies == [(t.link, t.block, t.queued_seconds, t.start_seconds, t.end_seconds) for t in replayed.transfers]
    assert [(u["subgroup"], u["start"], u["end"]) for u in rows["updates"]] == [
        (u.subgroup, u.start_seconds, u.end_seconds) for u in replayed.updates
    ]
    tiers = {"device": rows["memory"], **rows["below"]}
    peaks = {tier: max(sum(point[1:]) for point in memory["points"]) for tier, memory in tiers.items()}
    assert peaks == {tier: size for tier, size in replayed.peak_bytes.items() if size} and peaks["device"] <= device_bytes
    assert max(sum(point[1:]) for point in rows["unplanned"]["points"]) == max(live_bytes(trace))
    for memory in (rows["memory"], rows["unplanned"], *rows["below"].values()):
        assert all(ended is None or began <= ended for _, began, ended in memory["held"])
        for seconds, *sizes in memory["points"]:
            made_up: Counter[str] = Counter()
            for block, began, ended in memory["held"]:
                if began <= seconds and (ended is None or seconds < ended):
                    made_up[blocks[block]["kind"]] += blocks[block]["size_bytes"]
            told = dict(zip(memory["kinds"], sizes, strict=True))
            assert all(told[kind] == made_up[kind] for kind in told if kind != "workspace"), seconds


def test_each_copy_says_why(chain: Path, report: Report) -> None:
    rows = facts_of(report, chain, CHAIN_FILE)["timeline"]
    first = next(block.id for block in CHAIN.blocks if block.name == "activation.0")
    told = {rows["moves"][copy["move"]]["why"] for copy in rows["copies"] if copy["block"] == first}
    assert told == {"away after forward/0, until backward/0; if nothing left, forward/2 would exceed the budget by 20 B"}
    waiting = [stage for stage in rows["stages"] if stage["start"] > stage["reached"]]
    assert waiting and all(stage["waits_for"] for stage in waiting)


def test_the_page_has_the_data_that_json_prints(page: Page, chain: Path, report: Report) -> None:
    printed = json.loads(report(chain, "--trace", CHAIN_FILE, "--json", "--points", 3))
    for content in (printed, page.data):  # how long solvers took differs
        assert content["facts"]["timeline"]["seconds"] == 10.0
    assert printed["facts"] == page.data["facts"] and printed["sweep"] == page.data["sweep"]
    made = Plan.load(chain)
    path = critical_path(CHAIN, made, planner.simulate(CHAIN, made))
    assert printed["facts"]["critical"] == seconds_by_resource(path)

    points = page.data["sweep"]["points"]
    assert {point["device_bytes"]: point["predicted"] is None for point in points} == {10: False, 17: False, 30: False}
    assert points[0]["predicted"]["iteration_seconds"] == 10.0
    assert page.data["sweep"]["floor_bytes"] == 10, "the chart is shaded below"


def test_the_page_loads_nothing(page: Page) -> None:
    links = [value for _, given in page.tags for name, value in given.items() if name in ("src", "href", "action", "srcset")]
    assert set(links) <= {"data:,"}
    assert not re.search(
        r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", " ".join(page.texts["style"] + page.texts["script"])
    )
    policies = [given["content"] for tag, given in page.tags if tag == "meta" and given.get("http-equiv")]
    assert policies and str(policies[0]).startswith("default-src 'none'")


def test_the_page_tells_the_figures_of_the_plan(page: Page) -> None:
    assert page.texts["h1"] == ["Plan for chain"]
    assert page.texts["b"][0] == "10.0 s"
    (sentence,) = (text for text in page.texts["p"] if text.startswith(" an iteration"))
    assert sentence == (
        " an iteration (predicted): as fast as any plan can be; fits in 10 B of the 30 B that it needs; "
        "held up by device → storage."
    )
    told = " ".join(" ".join(page.texts[tag]) for tag in ("dt", "dd"))
    assert "10 B at least, 30 B if nothing moves" in told and "6.00 s" in told and "budgets: host no limit" in told
    sections = {given.get("id") for tag, given in page.tags if tag == "section"}
    assert {"memory", "timeline", "stages", "blocks", "copies", "sweep"} <= sections


def test_names_from_files_are_text(report: Report, tmp_path: Path) -> None:
    name = '</script><img src=x onerror="alert(1)">'
    blocks = tuple(block.model_copy(update={"name": name}) for block in CHAIN.blocks)
    hostile = CHAIN.rebuilt(name=name, blocks=blocks)
    hostile.save(tmp_path / "trace.json")
    planner.plan(hostile, Budgets(device_bytes=10)).save(tmp_path / "plan.json")
    report(tmp_path / "plan.json", "--trace", tmp_path / "trace.json", "-o", tmp_path / "a.html", "--points", 0)
    page = Page((tmp_path / "a.html").read_text())
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert page.data["facts"]["name"] == name and page.data["facts"]["blocks"][0]["name"] == name


def test_no_colour_has_two_meanings() -> None:
    for shade in (0, 1):
        looks = {name: pair[shade] for name, pair in (KINDS | PHASES | STALL).items()}
        values = {name: [int(colour[at : at + 2], 16) for at in (1, 3, 5)] for name, colour in looks.items()}
        for one, other in combinations(values, 2):
            apart = sum(abs(a - b) for a, b in zip(values[one], values[other], strict=True))
            assert apart > 60, f"{one} and {other} look alike"
    assert all(f".{name} {{" in style() for name in looks)


def test_the_timeline_for_perfetto(chain: Path, report: Report, tmp_path: Path) -> None:
    report(chain, "--trace", CHAIN_FILE, "--perfetto", tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert set(lanes.values()) >= {"compute", "device->storage", "storage->device", "updates on the host"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {lanes[span["tid"]] for span in spans} == {"compute", "stalls", "device->storage", "storage->device"}
    assert sum(span["dur"] for span in spans if lanes[span["tid"]] == "compute") == pytest.approx(6e6)
    assert sum(span["dur"] for span in spans if span["cat"] == "stall") == pytest.approx(4e6)
    counters = {
        event["name"]: event["args"]["activation"] for event in events if event["ph"] == "C" and event["args"]["activation"]
    }
    assert counters == {"device memory": 10, "storage memory": 10}
    first = next(span for span in spans if span["name"] == "backward/0")
    assert first["args"]["phase"] == "backward" and first["args"]["used_bytes"] == 10 and first["args"]["waited_seconds"] > 0
    flows = [event for event in events if event.get("cat") == "flow"]
    begun = {event["id"]: event for event in flows if event["ph"] == "s"}
    ended = {event["id"]: event for event in flows if event["ph"] == "f"}
    assert begun.keys() == ended.keys() and all(begun[number]["ts"] <= ended[number]["ts"] for number in begun)
    ways = {(lanes[begun[number]["tid"]], lanes[ended[number]["tid"]]) for number in begun}
    assert ways == {("compute", "device->storage"), ("device->storage", "storage->device"), ("storage->device", "compute")}


def test_updates_on_the_host_have_a_lane_and_a_terminal_is_told_what_takes_long(
    run: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    plan, out = planned(tmp_path, "host_update", 40), tmp_path / "timeline.json"
    done = run("report", plan, "--trace", file_of("host_update"), "--perfetto", out)
    assert done.code == 0 and "writing" in done.err
    updates = [event for event in json.loads(out.read_text())["traceEvents"] if event.get("cat") == "update"]
    replayed = planner.simulate(hand("host_update"), Plan.load(plan)).updates
    assert updates and [each["dur"] for each in updates] == [1e6 * (each.end_seconds - each.start_seconds) for each in replayed]


def test_a_plan_that_was_written_by_hand_promises_nothing(chain: Path, report: Report, tmp_path: Path) -> None:
    chain.write_text(json.dumps({**json.loads(chain.read_text()), "predicted": None}))
    report(chain, "--trace", CHAIN_FILE, "-o", tmp_path / "report.html", "--points", 0)
    page = Page((tmp_path / "report.html").read_text())
    assert page.texts["dt"][:2] == ["device budget", "moves"] and "an iteration (predicted)" not in str(page.texts)


def test_a_picture(chain: Path, report: Report, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    report(chain, "--trace", CHAIN_FILE, "--png", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_drawn_is_what_was_simulated(
    chain: Path, report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What matplotlib is asked for, which need not be installed."""
    asked, panels = mock.Mock(), [mock.Mock() for _ in range(3)]
    asked.Figure.return_value.subplots.return_value = panels
    for name in ("", ".backends", ".backends.backend_agg", ".figure", ".patches"):
        monkeypatch.setitem(sys.modules, f"matplotlib{name}", asked)
    report(chain, "--trace", CHAIN_FILE, "--png", tmp_path / "a.png")
    peaks = [max(map(sum, zip(*panel.stackplot.call_args.args[1], strict=True))) * 2**30 for panel in panels[:2]]
    assert peaks == [max(live_bytes(CHAIN)), 10]
    seconds: Counter[tuple[int, str]] = Counter()
    for bars in panels[2].broken_barh.call_args_list:
        seconds[round(bars.args[1][0] + 0.4), bars.kwargs["color"]] += sum(length for _, length in bars.args[0])
    lanes = {name: sum(seconds[lane, look[0]] for lane in range(3)) for name, look in (PHASES | STALL | KINDS).items()}
    assert {name: found for name, found in lanes.items() if found} == {"forward": 3, "backward": 3, "stall": 4, "activation": 4}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", str(CHAIN_FILE)], "found no place to write to"),
        (["--trace", str(CHAIN_FILE), "-o", "nowhere/a.html"], "there is no directory nowhere"),
        (["-o", "{folder}/a.html"], "--trace"),
        (["--trace", str(CHAIN_FILE), "-o", "{folder}/a.html", "--png", "{folder}/a.png"], "--png needs matplotlib"),
    ],
)
def test_what_cannot_be_reported(
    arguments: list[object], message: str, chain: Path, run: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is planned or written."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused = run("report", chain, *(str(argument).format(folder=chain.parent) for argument in arguments))
    assert refused.code != 0 and message in refused.err
    assert list(chain.parent.iterdir()) == [chain]
