"""The report of a plan: its data are the simulator's, its page loads nothing, names from files are text."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import planner
import teraio
from planner import Budgets, Plan, Trace
from planner.problem import live_bytes
from planner.simulator import critical_path
from teraio.cli.commands import app
from teraio.watching import CsvWriter, IterationStats, RunPhase
from tests.teraio.cli.report.pages import HAND, PLANNED, planned


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


def report(*arguments: object) -> str:
    """What `teraio report` prints."""
    done = CliRunner().invoke(app, ["report", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def chain(tmp_path: Path) -> tuple[Path, Path]:
    """A trace and a plan for it."""
    return planned(tmp_path, "chain", 10)


@pytest.fixture
def page(chain: tuple[Path, Path], tmp_path: Path) -> Page:
    trace, plan = chain
    report(plan, "--trace", trace, "-o", tmp_path / "report.html", "--points", 3)
    return Page((tmp_path / "report.html").read_text())


@pytest.mark.parametrize(("name", "device_bytes"), PLANNED)
def test_the_timeline_is_that_of_the_simulator(name: str, device_bytes: int, tmp_path: Path) -> None:
    trace = Trace.load(HAND / f"{name}.json")
    plan = planner.plan(trace, Budgets(device_bytes=device_bytes))
    plan.save(tmp_path / "plan.json")
    rows, replayed = timeline(HAND / f"{name}.json", tmp_path / "plan.json"), planner.simulate(trace, plan)
    assert rows["seconds"] == replayed.iteration_seconds
    assert [(s["reached"], s["start"], s["end"]) for s in rows["stages"]] == list(replayed.stages)
    copies = [(c["link"], c["block"], c["queued"], c["start"], c["end"]) for c in rows["copies"]]
    assert copies == [(t.link, t.block, t.queued_seconds, t.start_seconds, t.end_seconds) for t in replayed.transfers]
    assert [(u["subgroup"], u["start"], u["end"]) for u in rows["updates"]] == [
        (u.subgroup, u.start_seconds, u.end_seconds) for u in replayed.updates
    ]
    held = [sum(point[1:]) for point in rows["memory"]["points"]]
    assert max(held) == replayed.peak_bytes["device"] <= device_bytes
    assert max(sum(point[1:]) for point in rows["unplanned"]["points"]) == max(live_bytes(trace))


def timeline(trace: Path, plan: Path) -> Any:
    """The timeline that a report has."""
    return json.loads(report(plan, "--trace", trace, "--json", "--points", 0, "--no-compare"))["facts"]["timeline"]


def test_each_copy_says_why(chain: tuple[Path, Path]) -> None:
    rows = timeline(*chain)
    told = {copy["why"] for copy in rows["copies"] if copy["name"] == "activation.0"}
    assert told == {"away after forward/0, until backward/0; if nothing left, forward/2 would exceed the budget by 20 B"}
    waiting = [stage for stage in rows["stages"] if stage["start"] > stage["reached"]]
    assert waiting and all(stage["waits_for"] for stage in waiting)


def test_the_page_has_the_data_that_json_prints(page: Page, chain: tuple[Path, Path]) -> None:
    trace, plan = chain
    printed = json.loads(report(plan, "--trace", trace, "--json", "--points", 3))
    for content in (printed, page.data):  # how long solvers took differs
        assert content["facts"]["timeline"]["seconds"] == 10.0
    assert printed["facts"] == page.data["facts"] and printed["sweep"] == page.data["sweep"]
    loaded, made = Trace.load(trace), Plan.load(plan)
    path = critical_path(loaded, made, planner.simulate(loaded, made))
    assert printed["facts"]["critical"] == path.seconds()


def test_the_sweep_has_gaps_where_no_plan_is(page: Page) -> None:
    points = page.data["sweep"]["points"]
    assert [(point["device_bytes"], point["predicted"] is None) for point in points] == [
        (8, True),
        (10, False),
        (19, False),
        (30, False),
    ]
    assert points[1]["predicted"]["iteration_seconds"] == 10.0
    assert "no plan" in page.texts["td"]


def test_policies_are_compared_under_the_budget_of_the_plan(page: Page) -> None:
    comparison = page.data["comparison"]
    assert comparison["budgets"]["device_bytes"] == 10
    assert {"ilp", "teraio", "zero-infinity"} <= {verdict["policy"] for verdict in comparison["verdicts"]}
    assert "zero-infinity" in page.texts["td"]


def test_the_page_loads_nothing(page: Page) -> None:
    links = [value for _, given in page.tags for name, value in given.items() if name in ("src", "href", "action", "srcset")]
    assert set(links) <= {"data:,"}
    assert not re.search(
        r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", " ".join(page.texts["style"] + page.texts["script"])
    )
    policies = [given["content"] for tag, given in page.tags if tag == "meta" and given.get("http-equiv")]
    assert policies and str(policies[0]).startswith("default-src 'none'")


def test_the_page_tells_the_figures_of_the_plan(page: Page, chain: tuple[Path, Path]) -> None:
    assert page.texts["h1"] == ["Plan for chain"]
    told = dict(zip(page.texts["dt"], page.texts["dd"], strict=True))
    assert told["iteration (predicted)"] == "10.0 s" and told["without waiting"] == "6.00 s"
    assert told["device budget"] == "10 B" and told["needed if nothing moves"] == "30 B"
    assert {"activation.0", "forward/1"} <= set(page.texts["td"])


def test_names_from_files_are_text(tmp_path: Path) -> None:
    trace = Trace.load(HAND / "chain.json")
    name = '</script><img src=x onerror="alert(1)">'
    blocks = tuple(block.model_copy(update={"name": name}) for block in trace.blocks)
    hostile = trace.rebuilt(name=name, blocks=blocks)
    hostile.save(tmp_path / "trace.json")
    planner.plan(hostile, Budgets(device_bytes=10)).save(tmp_path / "plan.json")
    report(tmp_path / "plan.json", "--trace", tmp_path / "trace.json", "-o", tmp_path / "a.html", "--points", 0, "--no-compare")
    page = Page((tmp_path / "a.html").read_text())
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert page.data["facts"]["name"] == name and name in page.texts["td"]


def test_a_plan_alone(chain: tuple[Path, Path], tmp_path: Path) -> None:
    report(chain[1], "-o", tmp_path / "a.html")
    page = Page((tmp_path / "a.html").read_text())
    assert page.data["facts"] is None and page.data["sweep"] is None
    assert any("--trace" in text for text in page.texts["p"])


def run_file(folder: Path, *, phase: RunPhase = "planned", predicted: float = 10.0, run: int = 0) -> Path:
    """The file of a run of five iterations; the first two are profiled."""
    writer = CsvWriter(folder / "run.csv")
    for number, seconds in enumerate((30.0, 20.0, 11.0, 11.5, 14.0)):
        writer(
            IterationStats(
                run=run,
                iteration=number,
                phase="profile" if number < 2 else phase,
                seconds=seconds,
                waited_seconds=seconds - 6.0,
                recompute_seconds=0.0,
                predicted_seconds=predicted,
                tier_bytes={"device": 9},
                moved_bytes={"device->storage": 20, "storage->device": 20},
                busy_seconds={"device->storage": 2.5, "storage->device": 2.0},
            )
        )
    writer.close()
    return folder / "run.csv"


def measured_page(plan: Path, trace: Path, folder: Path, **run: Any) -> Page:
    measured = run_file(folder, **run)
    report(plan, "--trace", trace, "--measured", measured, "-o", folder / "a.html", "--points", 0, "--no-compare")
    return Page((folder / "a.html").read_text())


def test_predicted_beside_measured(chain: tuple[Path, Path], tmp_path: Path) -> None:
    page = measured_page(chain[1], chain[0], tmp_path)
    cells = page.texts["td"][page.texts["td"].index("iteration") :]
    assert cells[:6] == ["iteration", "10.0 s", "11.5 s", "waits", "4.00 s", "5.50 s"]
    assert cells[9:15] == ["device → storage, bytes", "20 B", "20 B", "device → storage, busy", "2.00 s", "2.50 s"]
    assert any("medians over 3 planned iterations of 5" in text for text in page.texts["p"])


def test_a_run_that_follows_no_plan_or_another_one(chain: tuple[Path, Path], tmp_path: Path) -> None:
    none = measured_page(chain[1], chain[0], tmp_path, phase="demand")
    assert any("None of the 5 iterations of the run followed a plan" in text for text in none.texts["p"])
    other = measured_page(chain[1], chain[0], tmp_path, predicted=8.0)
    assert any("follows another plan by now: that one predicts 8.00 s" in text for text in other.texts["p"])


def test_a_file_without_iterations(chain: tuple[Path, Path], tmp_path: Path) -> None:
    CsvWriter(tmp_path / "empty.csv").close()
    with pytest.raises(teraio.TeraioError, match="no iteration is in it"):
        report(chain[1], "--measured", tmp_path / "empty.csv", "-o", tmp_path / "a.html")


def test_the_timeline_for_perfetto(chain: tuple[Path, Path], tmp_path: Path) -> None:
    report(chain[1], "--trace", chain[0], "--perfetto", tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert set(lanes.values()) >= {"compute", "recompute", "device->storage", "storage->device", "updates on the host"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {lanes[span["tid"]] for span in spans} == {"compute", "stalls", "device->storage", "storage->device"}
    assert sum(span["dur"] for span in spans if lanes[span["tid"]] == "compute") == pytest.approx(6e6)
    assert sum(span["dur"] for span in spans if span["cat"] == "stall") == pytest.approx(4e6)
    counters = [event["args"]["activation"] for event in events if event["ph"] == "C"]
    assert max(counters) == 10


def test_a_picture_needs_matplotlib(chain: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(teraio.OptionsError, match=r"--png needs matplotlib .*pip install 'teraio\[plot\]'"):
        report(chain[1], "--trace", chain[0], "--png", tmp_path / "a.png")


def test_a_picture(chain: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    report(chain[1], "--trace", chain[0], "--png", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "found no place to write to"),
        (("-o", "nowhere/a.html"), "there is no directory nowhere"),
        (("--perfetto", "a.json"), "a timeline needs the trace"),
    ],
)
def test_wrong_options(arguments: tuple[str, ...], message: str, chain: tuple[Path, Path]) -> None:
    with pytest.raises(teraio.OptionsError, match=message):
        report(chain[1], *arguments)


def test_a_plan_for_another_trace(chain: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(teraio.PlanError, match="fingerprint"):
        report(chain[1], "--trace", HAND / "wrap.json", "-o", tmp_path / "a.html", "--points", 0, "--no-compare")
