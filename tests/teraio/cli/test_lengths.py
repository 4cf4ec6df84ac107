"""Inputs of varying length on the command line: a trace of a range, a plan that is thinned for some lengths, and bad input."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import Plan, Trace

from ...planner.traces import hand, layers, varying
from ..conftest import RunCommand
from ..traces import CHAIN_FILE
from .facts import fact, has_line


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    """The chain, at lengths up to 10: each activation takes a byte for each token, each stage a tenth of a second."""
    varying(hand("chain")).save(tmp_path / "trace.json")
    return tmp_path / "trace.json"


def test_a_plan_at_each_length(run: RunCommand, trace_file: Path, tmp_path: Path) -> None:
    plan_file, counts = tmp_path / "plan.json", tmp_path / "lengths.txt"
    counts.write_text("10 1\n7,1\n5;2.0\n")
    told = run("plan", trace_file, "--device", "20", "--lengths", counts, "-o", plan_file).out
    assert fact(told, "iteration, mean over the lengths") == "4.05 s", "a quarter of 6.0 and of 4.2 s, half of 3.0 s"
    assert has_line(told, r" +10 +25.0% +6.00 s +6.00 s +0 s +20 B +1")
    assert has_line(told, r" +5 +50.0% +3.00 s +3.00 s +0 s +15 B +0")
    replayed = run("simulate", trace_file, plan_file, "--length", "5").out
    assert fact(replayed, "iteration") == "3.00 s" and fact(replayed, "peak of device") == "15 B"
    assert [row["sizes"] for row in run("simulate", trace_file, plan_file, "--json").json["lengths"]] == [[10], [7], [5]]
    assert has_line(run("inspect", plan_file).out, r"the longest +6.00 s.*"), "without the trace that is not known"
    assert has_line(run("inspect", trace_file).out, r" +1 +600 ms +3 B +1 B")
    page = tmp_path / "page.html"
    run("report", plan_file, "--trace", trace_file, "-o", page, "--points", "0", "--no-compare")
    assert "Time against length" in page.read_text()
    run("plan", trace_file, "--device", "20", "-o", plan_file)
    assert Plan.load(plan_file).shorter[0].sizes == (8,), "lengths that cover the trace"


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ("5,11", "found length 11, wanted one from 1 to 10"),
        ("often", "neither a file nor a list"),
        (",".join(map(str, range(1, 70))), "at most 64 are planned for"),
        ("FILE:5 many", "line 1 is '5 many', wanted a length and how often it occurs"),
        ("FILE:", "no length is in it"),
        ("FILE:5 0", "no length is in it"),
    ],
)
def test_bad_lengths_are_one_line(run: RunCommand, trace_file: Path, tmp_path: Path, lengths: str, message: str) -> None:
    if lengths.startswith("FILE:"):
        (tmp_path / "lengths.txt").write_text(lengths.removeprefix("FILE:"))
        lengths = str(tmp_path / "lengths.txt")
    found = run("plan", trace_file, "--device", "20", "--lengths", lengths)
    assert found.code in (1, 2) and message in found.err and found.err.count("\n") == 1


def test_a_trace_or_plan_of_one_length(run: RunCommand, trace_file: Path, tmp_path: Path) -> None:
    assert "the trace is of one length" in run("plan", CHAIN_FILE, "--device", "20", "--lengths", "5").err
    run("plan", trace_file, "--device", "20", "-o", tmp_path / "plan.json")
    Trace.load(trace_file).rebuilt(lengths=None).save(tmp_path / "other.json")
    assert "the trace is of one length" in run("simulate", tmp_path / "other.json", tmp_path / "plan.json", "--length", "5").err
    varying(layers()).save(tmp_path / "another.json")
    told = run("simulate", tmp_path / "another.json", tmp_path / "plan.json", "--length", "5").err
    assert "the plan was made for the trace with fingerprint" in told and told.count("\n") == 1
    assert "wanted SHORTEST:LONGEST" in run("capture", "x:y", "-o", tmp_path / "t.json", "--lengths", "128").err
