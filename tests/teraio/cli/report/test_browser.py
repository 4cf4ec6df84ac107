"""The report in a real browser, without a network: `make test-browser`. Screenshots go to REPORT_SCREENSHOTS, if that is set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import planner
from benchmarks.transformer_trace import WORKLOADS
from planner import Budgets, Plan
from planner.problem import SolverSettings
from teraio.cli.plan_summary import sweep_budgets
from teraio.cli.report.content import report_of
from teraio.cli.report.page import html_page

from ....planner.traces import hand
from ...traces import CHAIN, planned

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-browser installs it")

SIZES = {"phone": (390, 844), "desktop": (1280, 900)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        path = os.environ.get("CHROMIUM")  # a browser that is installed already
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small page with a sweep, one with copies, and one with about a thousand stages and thousands of copies."""
    folder = tmp_path_factory.mktemp("pages")
    trace, plan = hand("recompute"), Plan.load(planned(folder, "recompute", 50))
    settings: dict[str, Any] = {"settings": SolverSettings(), "progress": lambda text: None}
    sweep = sweep_budgets(trace, [30, 40, 50, 60, 70], plan.budgets, "ilp", **settings)
    (folder / "small.html").write_text(html_page(report_of(plan, trace, sweep=sweep)))
    (folder / "copies.html").write_text(html_page(report_of(Plan.load(planned(folder, "chain", 10)), CHAIN)))
    large = WORKLOADS["Llama-3-70B"].trace()
    made = planner.plan(large, Budgets(device_bytes=94_000_000_000), policy="zero-infinity", lower_bound=False)
    report = report_of(made, large)
    timeline = report["facts"]["timeline"]
    assert len(timeline["stages"]) > 900 and len(timeline["copies"]) > 4000
    (folder / "large.html").write_text(html_page(report))
    return {name: folder / f"{name}.html" for name in ("small", "copies", "large")}


@pytest.fixture(params=["light", "dark"])
def opened(request: pytest.FixtureRequest, browser: Any) -> Iterator[Any]:
    """Opens a page at a size; fails if it says anything on the console or asks for anything but itself."""
    faults: list[str] = []
    contexts = []

    def open_page(path: Path, size: str) -> Any:
        width, height = SIZES[size]
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=request.param, has_touch=size == "phone", offline=True
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: faults.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("request", lambda asked: faults.append(f"asks for {asked.url}") if asked.url != path.as_uri() else None)
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-drawn]")
        page.wait_for_timeout(200)
        folder = os.environ.get("REPORT_SCREENSHOTS")
        if folder:
            page.screenshot(path=f"{folder}/{path.stem}-{size}-{request.param}.png", full_page=True)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not faults, faults


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["small", "large"])
def test_charts_are_drawn_and_nothing_is_wider_than_the_screen(name: str, size: str, opened: Any, pages: dict[str, Path]) -> None:
    page = opened(pages[name], size)
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    lanes = page.locator("#lanes .lane")
    assert lanes.count() >= 3
    assert page.locator("#memory-charts path").count() >= 2
    assert all(lanes.nth(number).locator("path").count() for number in (0, 1))
    fold = page.locator("#memory-charts svg").first.bounding_box()
    assert fold["y"] + fold["height"] < SIZES[size][1], "a chart is above the fold"
    if name == "small":
        assert page.locator("#sweep-chart .gap").count() >= 1 and page.locator("#sweep-chart .dot").count() == 3


def test_memory_has_an_axis_and_blocks_up_to_its_last_point(opened: Any, pages: dict[str, Path]) -> None:
    page = opened(pages["large"], "desktop")
    lane = page.locator("#memory-charts .lane").first
    sizes = [text for text in lane.locator("svg text").all_text_contents() if text[0].isdigit()]
    assert len(sizes) >= 3
    lane.focus()
    page.keyboard.press("End")
    told = page.locator("#details").inner_text()
    assert "blocks: " in told and "blocks: 0" not in told


@pytest.mark.parametrize("name", ["copies", "large"])
def test_the_keyboard_chooses_and_zooms(name: str, opened: Any, pages: dict[str, Path]) -> None:
    page = opened(pages[name], "desktop")
    lane = page.locator("#lanes .lane[aria-label^='device → ']").first
    lane.focus()
    page.keyboard.press("ArrowRight")
    first = page.locator("#details").inner_text()
    assert "size:" in first and "why:" in first
    page.keyboard.press("ArrowRight")
    assert page.locator("#details").inner_text() != first
    before = page.locator("#window").inner_text()
    page.keyboard.press("+")
    assert page.locator("#window").inner_text() != before
    page.keyboard.press("Escape")
    assert page.locator("#window").inner_text() == before
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.className || document.activeElement.id"))
    assert {"lane", "zoom-in", "scroll"} <= reached or {"lane", "scroll"} <= reached


@pytest.mark.parametrize("name", ["copies", "large"])
def test_from_a_row_to_the_lanes_and_back(name: str, opened: Any, pages: dict[str, Path]) -> None:
    page = opened(pages[name], "desktop")
    row = page.locator("#copies tbody tr").nth(1)
    block = row.locator("td").first.inner_text()
    row.click()
    told = page.locator("#told")
    assert told.locator("b").inner_text() == block
    assert page.locator("#lanes .chosen").count() >= 1 and page.locator("#life rect").count() >= 1
    told.locator("button", has_text="in the table of copies").click()
    assert page.locator("#copies tr.found td").first.inner_text() == block
    told.locator("button", has_text="close").click()
    assert page.locator("#lanes .chosen").count() == 0
