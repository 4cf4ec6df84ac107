"""The captured traces can be read, and their page says what was found."""

from __future__ import annotations

import json

import pytest

from planner import Trace, floor
from teraio.capturing import MachineDescription
from tests.docs.pages import DOCS
from tools import captured_page
from tools.captured_traces import CAPTURES, PAPER

FOUND = json.loads(captured_page.RESULTS.read_text())
SMALL = [capture for capture in CAPTURES if capture.hardware != PAPER]


def test_the_page_is_what_was_found() -> None:
    assert DOCS["captured"].text == captured_page.page(FOUND), "run: python -m tools.captured_page"


def test_every_trace_was_planned() -> None:
    assert list(FOUND) == [capture.name for capture in CAPTURES]
    assert sorted(path.name for path in PAPER.parent.glob("*.gz")) == sorted(capture.path.name for capture in CAPTURES)


@pytest.mark.parametrize("capture", SMALL, ids=lambda capture: capture.name)
def test_the_files_are_the_traces_that_were_planned(capture: captured_page.Capture) -> None:
    trace, found = Trace.load(capture.path), FOUND[capture.name]
    assert (trace.name, trace.fingerprint, len(trace.stages)) == (found["title"], found["fingerprint"], found["stages"])
    assert floor(trace)[0] == found["floor_bytes"]
    for plan in found["plans"].values():
        assert plan["ideal_seconds"] == pytest.approx(trace.ideal_seconds)
        assert plan["peak_bytes"]["device"] <= plan["device_bytes"]


def test_the_machine_of_the_paper() -> None:
    hardware = MachineDescription.load(PAPER).hardware
    link = hardware.link("storage", "device")
    assert link is not None and link.bytes_per_second == 4 * 6.7e9
