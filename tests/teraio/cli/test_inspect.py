"""What `inspect` and `simulate` tell of traces and plans, on the hand-made ones and some more."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from planner import Budgets, NotRecomputed, Plan, plan
from planner.schema import SolverReport, Tiled

from ...planner.traces import block, hand, hardware, layers, staged, subgroup, trace, varying
from ..conftest import RunCommand
from ..traces import CHAIN, CHAIN_FILE, edited, fact, file_of, has_line, planned, saved

# -- traces


def test_a_trace(run: RunCommand) -> None:
    text = run("inspect", file_of("clean_and_dirty")).out
    assert fact(text, "trace") == "clean_and_dirty" and fact(text, "without waiting") == "4.00 s"
    assert fact(text, "floor (smallest budget)") == "20 B, set by use"
    assert fact(text, "active on average") == "25.0% of the bytes that may move"
    for line in (
        r"backward +1 +1\.00 s",
        r"parameter +2 +20 B +20 B",
        r"device->storage +10 B/s +0 s",
        r" +2 +peak +1\.00 s +15 B +35 B",
        r" +1 +clean +parameter +10 B +25\.0% +clean +0",
    ):
        assert has_line(text, line), line


def test_how_idle_blocks_are(run: RunCommand) -> None:
    """In 'chain' the first activation waits for 4 s of 6, the second for 2 s, the third not at all."""
    text, summary = run("inspect", CHAIN_FILE).out, run("inspect", CHAIN_FILE, "--json").json
    assert [stage["live_bytes"] for stage in summary["stages"]] == [10, 20, 30, 30, 20, 10]
    rows = [line.split() for line in text.split("idlest blocks")[1].splitlines()[2:]]
    assert [(row[1], row[5], row[-1]) for row in rows] == [("activation.0", "4.00", "dirty"), ("activation.1", "2.00", "dirty")]
    assert [block["longest_idle_seconds"] for block in summary["blocks"]] == [4.0, 2.0, 0.0]
    assert [block["active_fraction"] for block in summary["blocks"]] == pytest.approx([1 / 3] * 3)
    assert "can update on" not in text and summary["updates"] == []
    text = run("inspect", CHAIN_FILE, "--rows", "2").out
    assert "longest stages: 2 of 6 (--rows shows more)" in text and "activation.1" in text and "activation.2" not in text
    assert len(run("inspect", CHAIN_FILE, "--rows", "2", "--json").json["stages"]) == 6


def test_links(run: RunCommand, tmp_path: Path) -> None:
    """Their paths if they have some, what they share, and that without a tier that can be used the floor is the peak."""
    to, back = CHAIN.hardware.links
    path = tmp_path / "trace.json"

    def inspected(*links: Any) -> tuple[str, Any]:
        CHAIN.model_copy(update={"hardware": CHAIN.hardware.model_copy(update={"links": links})}).save(path)
        return run("inspect", path).out, run("inspect", path, "--json").json

    text, summary = inspected(to.model_copy(update={"path": "[posix]"}), back)
    assert re.search(rf"^link +rate +latency +path\n{to.name} .* \[posix\]\n{back.name} .*[^\]]$", text, re.M)
    text, summary = inspected(to)
    assert summary["floor_bytes"] == summary["peak_bytes"] == 30 and run("plan", path, "--device", 29).code == 1
    text = run("inspect", file_of("one_drive")).out
    assert re.search(r"^shared rate +at the most +by\ndrive +10 B/s +device->storage, storage->device$", text, re.M)


def test_what_can_update_on_the_host(run: RunCommand, tmp_path: Path) -> None:
    """Of three subgroups one has no time on the host."""
    blocks = [block(10, [n + 1], range(4), "parameter") for n in range(3)]
    seconds = enumerate(((1.0, 5.0), (2.0, 7.0), (4.0, None)))
    subgroups = [subgroup(n + 1, [n], device, host, elements=1000 * 10**n) for n, (device, host) in seconds]
    path, _ = saved(tmp_path, trace(staged("oooo", 4.0), blocks, hardware(host=True), subgroups=subgroups))
    assert run("inspect", path, "--json").json["updates"] == [
        dict(where="device", subgroups=3, elements=111_000, seconds=7.0),
        dict(where="host", subgroups=2, elements=11_000, seconds=12.0),
    ]
    text = run("inspect", path).out
    assert has_line(text, r"device +3 +111,000 +7\.00 s") and has_line(text, r"host +2 +11,000 +12\.0 s")


# -- plans


def test_a_plan_with_and_without_its_trace(run: RunCommand, tmp_path: Path) -> None:
    path = planned(tmp_path, "wrap", 20)
    named, alone = run("inspect", path, "--trace", file_of("wrap")).out, run("inspect", path).out
    assert fact(named, "plan for") == "wrap" and fact(alone, "plan for") == "trace " + hand("wrap").fingerprint[7:15]
    assert has_line(named, r"0 weight +10 B +storage +2 update +6 update \(next iteration\) +2 +5 +5 B +0 .*")
    assert has_line(alone, r"0 +storage +2 +6 +2 +5")
    summary = run("inspect", path, "--json").json
    assert summary["moves"][0]["block_name"] is None and summary["predicted"]["iteration_seconds"] == 4.0
    compressed = tmp_path / "made.json.gz"
    Plan.load(path).save(compressed)
    assert run("inspect", compressed, "--json").json == summary


def test_a_dropped_block_is_called_so_and_what_the_solver_did_not_tell_is_not_shown(run: RunCommand, tmp_path: Path) -> None:
    path = planned(tmp_path, "clean_and_dirty", 25)
    text = run("inspect", path, "--trace", file_of("clean_and_dirty")).out
    assert fact(text, "moves").startswith("1 of 1 blocks, 1 without a copy out")
    assert has_line(text, r"1 clean .* dropped +\d+ +10 B +2 peak")
    failed = SolverReport(name="CBC", status="failed").model_dump(mode="json")
    text = run("inspect", edited(path, solver=failed, predicted=None)).out
    assert fact(text, "solver") == "CBC: failed, 0 s" and "predicted" not in text


def test_why_a_block_moves_and_what_the_iteration_waits_for(run: RunCommand, tmp_path: Path) -> None:
    """10 s: 6 s of stages and four copies with nothing to overlap."""
    path = planned(tmp_path, "chain", 10)
    summary = run("inspect", path, "--trace", CHAIN_FILE, "--json").json
    assert {(move["relieved_name"], move["excess_bytes"]) for move in summary["moves"]} == {("forward/2", 20)}
    assert summary["critical"]["seconds"] == {"stages": 6.0, "device->storage": 2.0, "storage->device": 2.0}
    assert [link["busy_seconds"] for link in summary["links"]] == [2.0, 2.0]
    pieces = summary["critical"]["pieces"]
    assert [piece["name"] for piece in pieces[:4]] == ["forward/0", "activation.0", "forward/1", "activation.1"]
    assert sum(stall["stall_seconds"] for stall in summary["stalls"]) == pytest.approx(summary["predicted"]["stall_seconds"])

    replay = run("simulate", CHAIN_FILE, path, "--json").json
    assert (replay["iteration_seconds"], replay["planned_seconds"]) == (10.0, 10.0)
    assert (replay["ideal_seconds"], replay["stall_seconds"]) == (6.0, 4.0)
    assert replay["moved_bytes"] == {"device->storage": 20, "storage->device": 20}
    assert [(link["transfers"], link["busy_seconds"]) for link in replay["links"]] == [(2, 2.0), (2, 2.0)]
    assert sum(stall["stall_seconds"] for stall in replay["stalls"]) == 4.0
    assert replay["critical"] == summary["critical"] and replay["host_processor"] == {"updates": 0, "busy_seconds": 0.0}

    inspected, simulated = run("inspect", path, "--trace", CHAIN_FILE).out, run("simulate", CHAIN_FILE, path).out
    for text in (inspected, simulated):
        assert fact(text, "critical path") == "stages 60.0%, device->storage 20.0%, storage->device 20.0%"
        assert has_line(text, r"storage->device +activation\.1 +6\.00 s +1\.00 s") and "stages that wait\n" in text
        assert "host's processor" not in text
    assert fact(simulated, "iteration") == "10.0 s" and fact(simulated, "stall") == "4.00 s, 40.0%"
    assert has_line(simulated, r"device->storage +2 +20 B +2\.00 s +20\.0% +10 B/s +10 B/s")
    alone = run("inspect", path, "--json").json
    assert alone["critical"] is alone["stalls"] is alone["moves"][0]["excess_bytes"] is None


# -- updates on the host


def test_a_plan_with_updates_on_the_host(run: RunCommand, tmp_path: Path) -> None:
    """Gradient out for 1 s, update for 1 s, weight in for 1 s, and 2 s of stages."""
    trace_file, path = file_of("host_update"), planned(tmp_path, "host_update", 40)
    named = run("inspect", path, "--trace", trace_file, "--json").json
    assert named["subgroups"] == 1 and named["host_processor"] == {"updates": 1, "busy_seconds": 1.0}
    assert named["host_updates"] == [dict(subgroup=0, stage=2, stage_name="update", elements=2, seconds=1.0)]
    moves = {move["block_name"]: (move["prefetch_start"], move["host_update"]) for move in named["moves"]}
    assert moves == {"gradient": (None, 0), "weight": (3, 0)}
    text = run("inspect", path, "--trace", trace_file).out
    assert fact(text, "updates on the host") == "1 of 1 subgroups"
    assert has_line(text, r"0 weight .* dropped +3 +for its update")
    assert fact(run("plan", trace_file, "--device", 40).out, "updates on the host") == "1 of 1 subgroups"
    replay = run("simulate", trace_file, path, "--json").json
    assert (replay["iteration_seconds"], replay["host_processor"]) == (5.0, {"updates": 1, "busy_seconds": 1.0})
    for told in (text, run("simulate", trace_file, path).out):
        assert fact(told, "host's processor") == "1 update, busy 1.00 s, 20.0%"

    alone, text = run("inspect", path, "--json").json, run("inspect", path).out
    assert (alone["subgroups"], alone["host_processor"]) == (None, None)
    assert alone["host_updates"] == [dict(subgroup=0, stage=None, stage_name=None, elements=None, seconds=None)]
    assert fact(text, "updates on the host") == "1" and "host's processor" not in text
    assert has_line(text, r"1 +host +1 +2 +1 +does not come back")


# -- recomputation


def test_what_runs_again_what_could_and_why_not(run: RunCommand, tmp_path: Path) -> None:
    """Three layers over a link of 1 byte per second: the first one runs again."""
    reasons = (NotRecomputed(stage=1, reason="it draws random numbers"), NotRecomputed(stage=2, reason="it draws random numbers"))
    traced = layers(rate=1.0).model_copy(update={"not_recomputed": reasons})
    trace_file, plan_file = saved(tmp_path, traced, plan(traced, Budgets(device_bytes=31)))
    text = run("inspect", plan_file, "--trace", trace_file).out
    assert has_line(text, r"recomputed +1 forward stages, 10 B: 1\.00 s in place of 20\.0 s of copies")
    assert has_line(text, r" +0 +0 forward/0 +5 backward/0 +10 B +1\.00 s +20\.0 s") and has_line(text, r"recomputation +1\.00 s")
    assert run("inspect", plan_file, "--trace", trace_file, "--json").json["reruns"][0]["copy_seconds"] == 20.0
    alone = run("inspect", plan_file).out
    assert has_line(alone, r"recomputed +1 forward stages") and has_line(alone, r" +0 +5")

    text = run("inspect", trace_file).out
    assert has_line(text, r"can be recomputed +30 B by 3 stages, in 3\.00 s \(to copy out and in: 60\.0 s\)")
    assert has_line(text, r"it draws random numbers +2 +forward/1")
    traced.rebuilt(recompute=(), not_recomputed=()).save(trace_file)
    assert "recomputed" not in run("inspect", trace_file).out


def test_what_runs_in_tiles_is_said_in_words(run: RunCommand, tmp_path: Path) -> None:
    """By inspect, advise and report: what, in how many tiles, what that gains and what it costs."""
    head = [Tiled(what=f"{graph}/head", tiles=8, whole_bytes=1 << 30, again_seconds=again) for graph, again in GRAPHS]
    traced = layers().model_copy(update={"tiled": tuple(head)})
    said = "head in 8 tiles: floor 1.00 GiB → 30 B, 20.0% slower"
    trace_file, plan_file = saved(tmp_path, traced, plan(traced, Budgets(device_bytes=31)))
    assert has_line(run("inspect", trace_file).out, f"in tiles +{said}")
    found = run("inspect", trace_file, "--json").json["tiles"]
    assert (found["floor_bytes"], [each["what"] for each in found["layers"]]) == (1 << 30, ["forward/head", "backward/head"])
    assert has_line(run("advise", trace_file, "--device", "31").out, f"in tiles +{said}")
    run("report", plan_file, "--trace", trace_file, "-o", tmp_path / "page.html")
    assert f"In tiles: {said}" in (tmp_path / "page.html").read_text()
    layers().save(trace_file)
    assert "tiles" not in run("inspect", trace_file).out


GRAPHS = (("forward", 0.0), ("backward", 1.0))


def test_moves_and_stalls_are_numbered_with_the_stages_that_run_again(run: RunCommand, tmp_path: Path) -> None:
    trace_file, plan_file = saved(tmp_path, layers(), plan(layers(), Budgets(device_bytes=31), policy="checkpoint"))
    text = run("inspect", plan_file, "--trace", trace_file).out
    assert re.search(r"^ +2 +2 forward/2 +3 backward/2 ", text, re.M), "in the numbers of the trace"
    assert re.search(r"^[01] a[01] .* [56] backward/[01] ", text, re.M), "later stages are one further"
    assert run("simulate", trace_file, plan_file, "--json").json["recompute_seconds"] == 1.0
    assert has_line(run("simulate", trace_file, plan_file).out, r"recomputation +1\.00 s")


# -- inputs of varying length: a trace of a range, a plan that is thinned for some lengths, and bad input


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
    run("report", plan_file, "--trace", trace_file, "-o", page, "--points", "0")
    assert "Time against length" in page.read_text()
    run("plan", trace_file, "--device", "20", "-o", plan_file)
    assert Plan.load(plan_file).shorter[0].sizes == (8,), "lengths that cover the trace"


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ("5,11", "found length 11, wanted one from 1 to 10"),
        ("often", "neither a file nor a list"),
        ("FILE:5 many", "line 1 is '5 many', wanted a length and how often it occurs"),
        ("FILE:5 0", "no length is in it"),
        ("FILE:\udcff", "cannot be read as a histogram of lengths"),
        (",".join(map(str, range(1, 1001))), "found 1,000 lengths, at most"),
    ],
)
def test_bad_lengths_are_one_line(run: RunCommand, trace_file: Path, tmp_path: Path, lengths: str, message: str) -> None:
    if lengths.startswith("FILE:"):
        (tmp_path / "lengths.txt").write_bytes(os.fsencode(lengths.removeprefix("FILE:")))
        lengths = str(tmp_path / "lengths.txt")
    found = run("plan", trace_file, "--device", "20", "--lengths", lengths)
    assert found.code in (1, 2) and message in found.err and found.err.count("\n") == 1


def test_a_trace_or_plan_of_one_length(run: RunCommand, trace_file: Path, tmp_path: Path) -> None:
    assert "the trace is of one length" in run("plan", CHAIN_FILE, "--device", "20", "--lengths", "5").err
    run("plan", trace_file, "--device", "20", "-o", tmp_path / "plan.json")
    varying(hand("chain"), lowest=(1, 2), highest=(10, 4), places=(0, 1)).save(tmp_path / "two.json")
    for length, traced, message in (
        ("0", "trace.json", "found length 0, wanted one from 1 to 10"),
        ("5", "two.json", "the plan knows inputs of 8, which is not what the trace has: 5 x 4"),
    ):
        told = run("simulate", tmp_path / traced, tmp_path / "plan.json", "--length", length).err
        assert message in told and told.count("\n") == 1
    assert "wanted SHORTEST:LONGEST" in run("capture", "x:y", "-o", tmp_path / "t.json", "--lengths", "128").err
