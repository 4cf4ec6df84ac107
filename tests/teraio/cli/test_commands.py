"""The command line, on the hand-made traces: what it prints, what it writes, and how it refuses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import planner
import teraio
from planner import Budgets, Plan, Trace, plan
from planner.policies import POLICIES
from planner.schema import SolverReport
from teraio.cli.output import format_bytes, format_seconds

from .conftest import Result, Run

TRACES = Path(__file__).parents[3] / "traces"


def hand(name: str) -> Path:
    return TRACES / "hand" / f"{name}.json"


def planned(folder: Path, name: str, device_bytes: int) -> Path:
    """A plan file for a hand-made trace."""
    path = folder / f"{name}.plan.json"
    plan(Trace.load(hand(name)), Budgets(device_bytes=device_bytes)).save(path)
    return path


def edited(path: Path, **changes: object) -> Path:
    """The JSON file again beside it, with some fields replaced."""
    copy = path.parent / f"edited.{path.name}"
    copy.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return copy


def by_hand(trace: Trace, moves: list[dict[str, Any]], device_bytes: int, **more: object) -> Plan:
    budgets = {"device_bytes": device_bytes}
    content = {"trace_fingerprint": trace.fingerprint, "policy": "by hand", "budgets": budgets, "moves": moves, **more}
    return Plan.model_validate(content)


def fact(output: str, name: str) -> str:
    """The value that stands beside `name`."""
    found = re.findall(rf"^{re.escape(name)} +(.*)$", output, re.MULTILINE)
    assert len(found) == 1, f"{name!r} occurs {len(found)} times in:\n{output}"
    return str(found[0])


# plan


def test_plan_writes_what_it_tells(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    result = run("plan", hand("chain"), "--device", "20", "-o", path)
    assert (result.code, result.err) == (0, "")
    made = Plan.load(path)
    assert made.predicted is not None and made.predicted.iteration_seconds == 6.0
    assert fact(result.out, "iteration") == "6.00 s"
    assert fact(result.out, "moves").startswith("1 of 1 blocks, 0 without a copy out")
    assert fact(result.out, "peak of device") == "20 B"
    assert fact(result.out, "moved device->storage") == fact(result.out, "moved storage->device") == "10 B"
    assert re.search(r"^0 activation\.0 +10 B +storage +0 forward/0 +5 backward/0 +0 +4 +10 B +2 forward/2$", result.out, re.M)


def test_plan_as_json_is_the_plan_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    printed = run("plan", hand("chain"), "--device", "20", "--json", "--output", path).json
    assert printed == json.loads(path.read_text())


def test_budgets_and_policy_reach_the_plan(run: Run) -> None:
    budgets = ("--device", "0.02KB", "--host", "1 KiB", "--storage", "1GiB")
    made = run("plan", hand("chain"), *budgets, "--policy", "belady", "--json").json
    assert made["budgets"] == {"device_bytes": 20, "host_bytes": 1024, "storage_bytes": 1 << 30}
    assert made["policy"] == "belady"


SOLVER_OPTIONS = ["--time-limit", "7", "--gap", "0.25", "--threads", "3", "--write-weight", "0.5"]


@pytest.mark.parametrize(("command", "device"), [("plan", "20"), ("compare", "20"), ("sweep", "20:30:2")])
def test_what_the_solver_may_take_reaches_it(run: Run, monkeypatch: pytest.MonkeyPatch, command: str, device: str) -> None:
    given: list[dict[str, object]] = []

    def spy(trace: Trace, budgets: Budgets, **keywords: object) -> Plan:
        given.append({name: value for name, value in keywords.items() if name != "incumbents"})
        return plan(trace, budgets, policy="belady")

    monkeypatch.setattr(planner, "plan", spy)
    assert run(command, hand("chain"), "--device", device, "--policy", "g10", *SOLVER_OPTIONS).code == 0
    wanted = {"policy": "g10", "time_limit_seconds": 7.0, "gap": 0.25, "threads": 3, "write_weight": 0.5}
    assert given and all(keywords == wanted for keywords in given)
    given.clear()
    assert run(command, hand("chain"), "--device", device).code == 0
    assert given[0] == {"policy": "ilp", "time_limit_seconds": 30.0, "gap": 0.005, "threads": 2, "write_weight": 0.005}


def test_the_help_of_the_solver_options_teaches(run: Run) -> None:
    for command in ("plan", "compare", "sweep"):
        text = " ".join(run(command, "--help").out.split())
        assert "drives wear out too soon" in text and "0.005" in text and "Threads that the solver may use" in text


def test_a_tier_with_a_budget_of_nothing_is_not_used(run: Run) -> None:
    without_host = run("plan", hand("two_tiers"), "--device", "20", "--host", "0", "--json").json
    assert {move["tier"] for move in without_host["moves"]} == {"storage"}
    without_drives = run("plan", hand("two_tiers"), "--device", "20", "--storage", "0", "--json").json
    assert {move["tier"] for move in without_drives["moves"]} == {"host"}
    asked = run("advise", hand("two_tiers"), "--device", "20", "--host", "0", "--json").json
    assert "twice the host memory" not in {answer["what"] for answer in asked["answers"]}


def test_nothing_moves_where_everything_fits(run: Run) -> None:
    result = run("plan", hand("chain"), "--device", "1GiB")
    assert result.code == 0 and fact(result.out, "moves").startswith("0 of 0 blocks")
    assert "copy out  copy in" not in result.out


# simulate


def test_simulate_tells_where_the_time_goes(run: Run, tmp_path: Path) -> None:
    path = planned(tmp_path, "chain", 10)  # 10 s: 6 s of stages and four copies with nothing to overlap
    replay = run("simulate", hand("chain"), path, "--json").json
    assert (replay["iteration_seconds"], replay["planned_seconds"]) == (10.0, 10.0)
    assert (replay["ideal_seconds"], replay["stall_seconds"]) == (6.0, 4.0)
    assert replay["moved_bytes"] == {"device->storage": 20, "storage->device": 20}
    assert [(link["transfers"], link["busy_seconds"]) for link in replay["links"]] == [(2, 2.0), (2, 2.0)]
    assert sum(stall["stall_seconds"] for stall in replay["stalls"]) == 4.0
    text = run("simulate", hand("chain"), path).out
    assert fact(text, "iteration") == "10.0 s" and fact(text, "stall") == "4.00 s, 40.0%"
    assert re.search(r"^device->storage +2 +20 B +2\.00 s +20\.0%$", text, re.M)
    assert "stages that wait\n" in text


def test_simulate_without_stalls_and_without_a_prediction(run: Run, tmp_path: Path) -> None:
    path = edited(planned(tmp_path, "chain", 20), predicted=None)
    text = run("simulate", hand("chain"), path).out
    assert "no stage waits" in text and fact(text, "in the plan's file") == "not given"


# inspect


@pytest.mark.parametrize(
    ("name", "floor_bytes", "peak_bytes"),
    [
        ("chain", 10, 30),
        ("clean_and_dirty", 20, 35),
        ("copy_stays_valid", 10, 20),
        ("diamond", 20, 30),
        ("swap", 30, 60),
        ("wrap", 15, 25),
        ("one_drive", 20, 30),
        ("two_tiers", 20, 40),
        ("host_update", 40, 60),
        ("no_way_back", 20, 20),
    ],
)
def test_inspect_tells_floor_and_peak(run: Run, name: str, floor_bytes: int, peak_bytes: int) -> None:
    summary = run("inspect", hand(name), "--json").json
    assert (summary["floor_bytes"], summary["peak_bytes"]) == (floor_bytes, peak_bytes)
    too_little = run("plan", hand(name), "--device", floor_bytes - 1)
    assert too_little.code == 1 and f"{summary['floor_stage']!r} needs {floor_bytes} bytes" in too_little.err
    assert run("plan", hand(name), "--device", floor_bytes).code == 0


def test_where_no_tier_can_be_used_the_floor_is_the_peak(run: Run, tmp_path: Path) -> None:
    trace = Trace.load(hand("chain"))
    one_way = trace.hardware.model_copy(update={"links": trace.hardware.links[:1]})
    trace.model_copy(update={"hardware": one_way}).save(tmp_path / "trace.json")
    summary = run("inspect", tmp_path / "trace.json", "--json").json
    assert summary["floor_bytes"] == summary["peak_bytes"] == 30
    assert run("plan", tmp_path / "trace.json", "--device", 29).code == 1


def test_inspect_tells_the_path_of_links_that_have_one(run: Run, tmp_path: Path) -> None:
    trace = Trace.load(hand("chain"))
    to, back = trace.hardware.links
    links = (to.model_copy(update={"path": "[posix]"}), back)
    hardware = trace.hardware.model_copy(update={"links": links})
    trace.model_copy(update={"hardware": hardware}).save(tmp_path / "trace.json")
    text = run("inspect", tmp_path / "trace.json").out
    assert re.search(rf"^link +rate +latency +path\n{to.name} .* \[posix\]\n{back.name} .*[^\]]$", text, re.M)
    assert run("inspect", tmp_path / "trace.json", "--json").json["hardware"]["links"][0]["path"] == "[posix]"
    assert not re.search(r"latency +path", run("inspect", hand("chain")).out)


def test_inspect_a_trace(run: Run) -> None:
    text = run("inspect", hand("clean_and_dirty")).out
    assert fact(text, "trace") == "clean_and_dirty" and fact(text, "iteration without waiting") == "4.00 s"
    assert fact(text, "floor (smallest budget)") == "20 B, set by use"
    assert re.search(r"^backward +1 +1\.00 s$", text, re.M)
    assert re.search(r"^parameter +2 +20 B +20 B$", text, re.M)
    assert re.search(r"^device->storage +10 B/s +0 s$", text, re.M)
    assert re.search(r"^ +2 +peak +1\.00 s +15 B +35 B$", text, re.M)
    assert re.search(r"^ +1 +clean +parameter +10 B +25\.0% +clean +0$", text, re.M)
    assert fact(text, "active on average") == "25.0% of the bytes that may move"


def test_rows_limits_the_long_tables(run: Run) -> None:
    text = run("inspect", hand("chain"), "--rows", "2").out
    assert "longest stages: 2 of 6 (--rows shows more)" in text
    assert "activation.1" in text and "activation.2" not in text
    assert "activation.2" in run("inspect", hand("chain"), "--rows", "3").out
    assert len(run("inspect", hand("chain"), "--rows", "2", "--json").json["stages"]) == 6


def test_inspect_a_plan_with_and_without_its_trace(run: Run, tmp_path: Path) -> None:
    path = planned(tmp_path, "wrap", 20)
    named = run("inspect", path, "--trace", hand("wrap")).out
    assert fact(named, "plan for") == "wrap"
    assert re.search(r"^0 weight +10 B +storage +2 update +6 update \(next iteration\) +2 +5 +5 B +0 .*$", named, re.M)
    alone = run("inspect", path).out
    assert fact(alone, "plan for") == Trace.load(hand("wrap")).fingerprint
    assert re.search(r"^0 +storage +2 +6 +2 +5$", alone, re.M)
    summary = run("inspect", path, "--json").json
    assert summary["moves"][0]["block_name"] is None and summary["predicted"]["iteration_seconds"] == 4.0


def test_a_dropped_block_is_called_so(run: Run, tmp_path: Path) -> None:
    path = planned(tmp_path, "clean_and_dirty", 25)
    text = run("inspect", path, "--trace", hand("clean_and_dirty")).out
    assert fact(text, "moves").startswith("1 of 1 blocks, 1 without a copy out")
    assert re.search(r"^1 clean .* dropped +\d+ +10 B +2 peak$", text, re.M)


def test_what_the_solver_did_not_tell_is_not_shown(run: Run, tmp_path: Path) -> None:
    failed = SolverReport(name="CBC", status="failed").model_dump(mode="json")
    path = edited(planned(tmp_path, "chain", 20), solver=failed, predicted=None)
    text = run("inspect", path).out
    assert fact(text, "solver") == "CBC: failed, 0 s" and "predicted" not in text


def test_the_largest_idle_blocks(run: Run) -> None:
    """In 'chain', the first activation waits for 4 s of 6, the second for 2 s, the third not at all."""
    text = run("inspect", hand("chain")).out
    shown = text.split("idlest blocks")[1]
    rows = [line.split() for line in shown.splitlines()[2:]]
    assert [(row[1], row[5], row[-1]) for row in rows] == [("activation.0", "4.00", "dirty"), ("activation.1", "2.00", "dirty")]
    blocks = run("inspect", hand("chain"), "--json").json["blocks"]
    assert [block["longest_idle_seconds"] for block in blocks] == [4.0, 2.0, 0.0]
    assert [block["active_fraction"] for block in blocks] == pytest.approx([1 / 3] * 3)


def test_memory_over_time(run: Run) -> None:
    """In 'chain' 10, 20, 30, 30, 20, 10 bytes; a bar of eight steps is full at 30."""
    text = run("inspect", hand("chain")).out
    assert re.search(r"^phase +fffbbb$", text, re.M)
    assert re.search(r"^activation +30 B +▃▆██▆▃$", text, re.M) and re.search(r"^workspace +0 B +······$", text, re.M)
    stages = run("inspect", hand("chain"), "--json").json["stages"]
    assert [stage["bytes_by_kind"] for stage in stages] == [{"activation": size} for size in (10, 20, 30, 30, 20, 10)]


def test_memory_over_time_shows_the_peak_of_many_stages(run: Run, tmp_path: Path) -> None:
    sizes = [8 if number == 301 else 1 for number in range(600)]
    stages = [dict(id=n, name=f"s{n}", phase="user", duration_seconds=1.0, workspace_bytes=size) for n, size in enumerate(sizes)]
    path = tmp_path / "long.json"
    Trace.build(name="long", hardware={"name": "x", "device_memory_bytes": 9}, stages=stages).save(path)
    line = next(line for line in run("inspect", path).out.splitlines() if line.startswith("workspace"))
    assert line.split()[-1] == "▁" * 30 + "█" + "▁" * 29


def test_why_a_block_moves_and_what_the_iteration_waits_for(run: Run, tmp_path: Path) -> None:
    path = planned(tmp_path, "chain", 10)
    summary = run("inspect", path, "--trace", hand("chain"), "--json").json
    assert {(move["relieved_name"], move["excess_bytes"]) for move in summary["moves"]} == {("forward/2", 20)}
    shares = {"stages": 6.0, "device->storage": 2.0, "storage->device": 2.0}
    assert summary["critical"]["seconds"] == shares
    assert [link["busy_seconds"] for link in summary["links"]] == [2.0, 2.0]
    replay = run("simulate", hand("chain"), path, "--json").json
    assert replay["critical"] == summary["critical"]
    pieces = summary["critical"]["pieces"]
    assert [piece["name"] for piece in pieces[:4]] == ["forward/0", "activation.0", "forward/1", "activation.1"]
    for text in (run("inspect", path, "--trace", hand("chain")).out, run("simulate", hand("chain"), path).out):
        assert fact(text, "critical path") == "stages 60.0%, device->storage 20.0%, storage->device 20.0%"
        assert re.search(r"^storage->device +activation\.1 +6\.00 s +1\.00 s$", text, re.M)
    alone = run("inspect", path, "--json").json
    assert alone["critical"] is None and alone["moves"][0]["excess_bytes"] is None


def test_a_move_that_no_stage_needs(run: Run, tmp_path: Path) -> None:
    roomy = edited(planned(tmp_path, "chain", 20), budgets={"device_bytes": 30})
    summary = run("inspect", roomy, "--trace", hand("chain"), "--json").json
    assert [(move["relieved_stage"], move["excess_bytes"]) for move in summary["moves"]] == [(None, None)]
    assert re.search(r" no stage$", run("inspect", roomy, "--trace", hand("chain")).out, re.M)


def test_the_reason_is_a_stage_that_the_block_is_away_in(run: Run, tmp_path: Path) -> None:
    """Two clean blocks of 10 bytes; the budget is 60. If nothing left, 70 bytes in s0, 65 in s1, 20 in s2."""
    second = dict(phase="forward", duration_seconds=1.0)
    stages = [dict(id=n, name=f"s{n}", workspace_bytes=size, **second) for n, size in enumerate((50, 45, 0))]
    common = dict(kind="parameter", size_bytes=10, persistent=True, writes=[])
    blocks = [dict(id=0, name="early", reads=[0], **common), dict(id=1, name="late", reads=[2], **common)]
    trace = Trace.load(hand("chain"))
    trace = Trace.build(name="made", hardware=trace.hardware, stages=stages, blocks=blocks)
    trace.save(tmp_path / "trace.json")
    moves = [
        dict(block=block, after=after, before=back, tier="storage", offload=None, prefetch=dict(start=back, ready_by=back))
        for block, after, back in ((0, 0, 3), (1, 2, 5))
    ]
    by_hand(trace, moves, 60, initial=[dict(block=block, tier="storage") for block in (0, 1)]).save(tmp_path / "plan.json")
    summary = run("inspect", tmp_path / "plan.json", "--trace", tmp_path / "trace.json", "--json").json
    reasons = {move["block_name"]: (move["relieved_name"], move["excess_bytes"]) for move in summary["moves"]}
    assert reasons == {"early": ("s1", 5), "late": ("s0", 10)}


def test_updates_on_the_host(run: Run, tmp_path: Path) -> None:
    """The gradient stays away: it relieves the stage that would have updated. 1 s out, 3 s update, 1 s in, 2 s of stages."""
    phases = ("forward", "backward", "optimizer")
    stages = [dict(id=n, name=name, phase=name, duration_seconds=1.0) for n, name in enumerate(phases)]
    common = dict(size_bytes=40, writes=[2])
    blocks = [dict(id=0, name="weight", kind="parameter", persistent=True, reads=[0, 2], **common)]
    blocks.append(dict(id=1, name="slope", kind="gradient", persistent=False, reads=[2], **{**common, "writes": [1]}))
    links = [dict(bytes_per_second=40.0, **{"from": a, "to": b}) for a, b in (("device", "host"), ("host", "device"))]
    subgroup = dict(id=0, stage=2, blocks=[0, 1], elements=10, device_seconds=1.0, host_seconds=3.0)
    hardware = dict(name="x", device_memory_bytes=99, links=links)
    trace = Trace.build(name="made", hardware=hardware, stages=stages, blocks=blocks, subgroups=[subgroup])
    trace.save(tmp_path / "trace.json")
    gone = dict(block=1, after=1, before=2, tier="host", offload=dict(start=1, free_after=1), prefetch=None)
    back = dict(block=0, after=0, before=3, tier="host", offload=None, prefetch=dict(start=3, ready_by=3))
    more = {"updates": [dict(subgroup=0, where="host")], "initial": [dict(block=0, tier="host")]}
    by_hand(trace, [gone, back], 70, **more).save(tmp_path / "plan.json")
    text = run("inspect", tmp_path / "plan.json", "--trace", tmp_path / "trace.json").out
    assert fact(text, "critical path") == "host updates 42.9%, stages 28.6%, device->host 14.3%, host->device 14.3%"
    assert re.search(r"^1 slope +40 B +host +1 backward +2 optimizer +1 +does not come back +10 B +2 optimizer$", text, re.M)
    assert re.search(r"^host updates +optimizer +1\.00 s +3\.00 s$", text, re.M)


@pytest.fixture
def updated_on_host(tmp_path: Path) -> Path:
    """A plan of 'host_update' whose one subgroup updates on the host, as worked out by hand: gradient out for
    1 s, update for 1 s, weight in for 1 s, and 2 s of stages."""
    return planned(tmp_path, "host_update", 40)


def test_inspect_a_plan_with_updates_on_the_host(run: Run, updated_on_host: Path) -> None:
    named = run("inspect", updated_on_host, "--trace", hand("host_update"), "--json").json
    assert named["subgroups"] == 1
    assert named["host_updates"] == [dict(subgroup=0, stage=2, stage_name="update", elements=2, seconds=1.0)]
    assert named["host_processor"] == {"updates": 1, "busy_seconds": 1.0}
    moves = {move["block_name"]: move for move in named["moves"]}
    assert {name: (move["prefetch_start"], move["host_update"]) for name, move in moves.items()} == {
        "gradient": (None, 0),
        "weight": (3, 0),
    }
    text = run("inspect", updated_on_host, "--trace", hand("host_update")).out
    assert fact(text, "updates on the host") == "1 of 1 subgroups"
    assert fact(text, "host's processor") == "1 update, busy 1.00 s, 20.0%"
    assert re.search(r"^0 weight .* dropped +3 +for its update$", text, re.M)
    assert fact(run("plan", hand("host_update"), "--device", 40).out, "updates on the host") == "1 of 1 subgroups"


def test_inspect_a_plan_with_updates_on_the_host_without_its_trace(run: Run, updated_on_host: Path) -> None:
    summary = run("inspect", updated_on_host, "--json").json
    assert (summary["subgroups"], summary["host_processor"]) == (None, None)
    assert summary["host_updates"] == [dict(subgroup=0, stage=None, stage_name=None, elements=None, seconds=None)]
    text = run("inspect", updated_on_host).out
    assert fact(text, "updates on the host") == "1" and "host's processor" not in text
    assert re.search(r"^1 +host +1 +2 +1 +does not come back$", text, re.M)


def test_updates_that_stay_on_the_device(run: Run, tmp_path: Path) -> None:
    """Said where there are subgroups, even if the plan's file lists the update; not mentioned where there are none."""
    path = edited(planned(tmp_path, "host_update", 60), updates=[dict(subgroup=0, where="device")])
    text = run("inspect", path, "--trace", hand("host_update")).out
    assert fact(text, "updates on the host") == "0 of 1 subgroups" and "host's processor" not in text
    summary = run("inspect", path, "--trace", hand("host_update"), "--json").json
    assert (summary["subgroups"], summary["host_updates"]) == (1, [])
    assert "updates on the host" not in run("inspect", path).out
    assert "updates on the host" not in run("plan", hand("chain"), "--device", 20).out


def test_simulate_tells_what_the_hosts_processor_does(run: Run, tmp_path: Path, updated_on_host: Path) -> None:
    replay = run("simulate", hand("host_update"), updated_on_host, "--json").json
    assert (replay["iteration_seconds"], replay["host_processor"]) == (5.0, {"updates": 1, "busy_seconds": 1.0})
    assert fact(run("simulate", hand("host_update"), updated_on_host).out, "host's processor") == "1 update, busy 1.00 s, 20.0%"
    path = planned(tmp_path, "chain", 20)
    assert "host's processor" not in run("simulate", hand("chain"), path).out
    assert run("simulate", hand("chain"), path, "--json").json["host_processor"] == {"updates": 0, "busy_seconds": 0.0}


def test_a_move_beside_the_update_on_the_host_is_not_for_it(run: Run, tmp_path: Path) -> None:
    """The weight also leaves between forward and backward; only the move around its update serves that."""
    forward, backward, update = 0, 2, 3
    names = {update: "optimizer", forward: "forward", forward + 1: "user", backward: "backward"}
    stages = [dict(id=n, name=names[n], phase=names[n], duration_seconds=1.0) for n in range(4)]
    uses = sorted([update, forward, backward])
    weight = dict(id=0, name="weight", kind="parameter", size_bytes=10, persistent=True, reads=uses, writes=[update])
    subgroup = dict(id=0, stage=update, blocks=[0], elements=5, device_seconds=0.5, host_seconds=2.0)
    hardware = Trace.load(hand("host_update")).hardware
    Trace.build(name="m", hardware=hardware, stages=stages, blocks=[weight], subgroups=[subgroup]).save(tmp_path / "trace.json")
    trace = Trace.load(tmp_path / "trace.json")
    moves = [
        dict(block=0, after=after, before=back, tier="host", offload=None, prefetch=dict(start=back, ready_by=back))
        for after, back in ((forward, backward), (backward, forward + 4))
    ]
    more = {"updates": [dict(subgroup=0, where="host")], "initial": [dict(block=0, tier="host")]}
    by_hand(trace, moves, 10, **more).save(tmp_path / "plan.json")
    summary = run("inspect", tmp_path / "plan.json", "--trace", tmp_path / "trace.json", "--json").json
    assert {move["after"]: move["host_update"] for move in summary["moves"]} == {forward: None, backward: 0}


def test_inspect_tells_what_can_update_on_the_host(run: Run, tmp_path: Path) -> None:
    """Of three subgroups one has no time on the host."""
    stages = [dict(id=n, name="s", phase="optimizer", duration_seconds=4.0) for n in range(4)]
    common = dict(kind="parameter", size_bytes=10, persistent=True, reads=[0, 1, 2, 3])
    blocks = [dict(id=n, name=f"w{n}", writes=[n + 1], **common) for n in range(3)]
    seconds = ((1.0, 5.0), (2.0, 7.0), (4.0, None))
    subgroups = [
        dict(id=n, stage=n + 1, blocks=[n], elements=1000 * 10**n, device_seconds=device, host_seconds=host)
        for n, (device, host) in enumerate(seconds)
    ]
    trace = Trace.build(
        name="m", hardware=Trace.load(hand("host_update")).hardware, stages=stages, blocks=blocks, subgroups=subgroups
    )
    trace.save(tmp_path / "trace.json")
    assert run("inspect", tmp_path / "trace.json", "--json").json["updates"] == [
        dict(where="device", subgroups=3, elements=111_000, seconds=7.0),
        dict(where="host", subgroups=2, elements=11_000, seconds=12.0),
    ]
    text = run("inspect", tmp_path / "trace.json").out
    assert re.search(r"^device +3 +111,000 +7\.00 s$", text, re.M) and re.search(r"^host +2 +11,000 +12\.0 s$", text, re.M)
    assert "can update on" not in run("inspect", hand("chain")).out
    assert run("inspect", hand("chain"), "--json").json["updates"] == []


def test_inspect_tells_what_links_share(run: Run) -> None:
    text = run("inspect", hand("one_drive")).out
    assert re.search(r"^shared rate +at the most +by\ndrive +10 B/s +device->storage, storage->device$", text, re.M)
    shared = run("inspect", hand("one_drive"), "--json").json["hardware"]["shared"]
    assert shared == [dict(name="drive", links=["device->storage", "storage->device"], bytes_per_second=10.0)]
    assert "shared rate" not in run("inspect", hand("two_tiers")).out


def test_messages_are_fit_for_a_terminal(run: Run, tmp_path: Path) -> None:
    missing = run("inspect", tmp_path / "\x1b[2J\u202enone.json")
    assert missing.code == 1 and "\\x1b[2J\\u202enone.json: cannot be read" in missing.err and missing.err[:-1].isprintable()
    stages = [dict(id=n, name="s", phase="user", duration_seconds=1.0) for n in range(3000)]
    block = dict(id=0, name="b", kind="buffer", size_bytes=1, persistent=True, reads=list(range(3000)), writes=[])
    trace = Trace.build(name="long", hardware=Trace.load(hand("chain")).hardware, stages=stages, blocks=[block])
    trace.save(tmp_path / "trace.json")
    wrong = dict(block=0, after=0, before=9, tier="storage", offload=None, prefetch=dict(start=9, ready_by=9))
    by_hand(trace, [wrong], 9).save(tmp_path / "plan.json")
    refused = run("simulate", tmp_path / "trace.json", tmp_path / "plan.json")
    assert refused.code == 1 and "which are not consecutive uses" in refused.err and len(refused.err) < 2100


def test_compressed_files_are_inspected_too(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "made.json.gz"
    Plan.load(planned(tmp_path, "chain", 20)).save(path)
    assert run("inspect", path, "--json").json["policy"] == "ilp"


def test_names_cannot_command_the_terminal(run: Run, tmp_path: Path) -> None:
    content = json.loads(hand("chain").read_text())
    del content["fingerprint"]
    links = ["device->storage", "storage->device"]
    content["hardware"]["shared"] = [dict(links=links, bytes_per_second=20.0)]
    for entry in (content, content["hardware"], *content["hardware"]["shared"], *content["stages"], *content["blocks"]):
        entry["name"] = "\x1b]0;title\x07\x1b[2J\r\x9b31m\u202eevil\n[red]bold[/red]"
    path = tmp_path / "evil.json"
    path.write_text(json.dumps(content))
    made = tmp_path / "plan.json"
    outputs = [run("plan", path, "--device", "10", "-o", made), run("inspect", path), run("simulate", path, made)]
    outputs += [run("inspect", made, "--trace", path), run("compare", path, "--device", "20"), run("plan", path, "--device", "9")]
    outputs += [run("sweep", path, "--device", "9:30:2"), run("inspect", path, "--json")]
    for result in outputs:
        shown = result.out + result.err
        assert "evil" in shown and all(character.isprintable() or character == "\n" for character in shown)
        assert result.out.startswith("{") or "[red]bold[/red]" in shown, "a name is no markup"


@pytest.mark.parametrize("arguments", [["inspect", hand("chain")], ["inspect", hand("chain"), "--json"], ["schema", "plan"]])
def test_an_output_that_is_full(arguments: list[object]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "teraio.cli", *map(str, arguments)],
            cwd=TRACES.parent,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr == "teraio: the standard output cannot be written: No space left on device\n"


def test_a_terminal_that_lacks_characters(tmp_path: Path) -> None:
    content = {**json.loads(hand("chain").read_text()), "name": "模型"}
    path = tmp_path / "named.json"
    path.write_text(json.dumps(content))
    done = subprocess.run(
        [sys.executable, "-m", "teraio.cli", "inspect", str(path)],
        cwd=TRACES.parent,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert fact(done.stdout, "trace") == "??"


# schema, help, version


@pytest.mark.parametrize("kind", ["trace", "plan"])
def test_schema_prints_the_published_one(run: Run, kind: str) -> None:
    assert run("schema", kind).json == json.loads((TRACES / f"{kind}.schema.json").read_text())


def test_help_and_version(run: Run) -> None:
    helped = run("--help")
    assert helped.code == 0
    assert all(f"\n  {command} " in helped.out for command in ("plan", "simulate", "compare", "sweep", "inspect", "schema"))
    assert run("--version") == Result(0, f"teraio {teraio.__version__}\n", "")
    assert "--device" in run("plan", "--help").out
    assert run().code == 2


# refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "{chain}", "--device", "9"], "needs 10 bytes at once"),
        (["plan", "{chain}", "--device", "29", "--policy", "keep-all"], "needs 30 bytes"),
        (["plan", "{chain}", "--device", "10", "--storage", "1"], "raise storage_budget"),
        (["plan", "{none}", "--device", "20"], "none.json: cannot be read: No such file"),
        (["plan", "{plan}", "--device", "20"], "this reader takes 'teraio.trace' only"),
        (["plan", "{chain}", "--device", "20", "-o", "{folder}"], "cannot be written: Is a directory"),
        (["simulate", "{chain}", "{chain}"], "this reader takes 'teraio.plan' only"),
        (["simulate", "{wrap}", "{plan}"], "plan again"),
        (["simulate", "{chain}", "{foreign}"], "block 3"),
        (["inspect", "{none}"], "cannot be read: No such file"),
        (["inspect", "{folder}"], "cannot be read: Is a directory"),
        (["inspect", "{damaged}"], "malformed JSON at line 1 column 2"),
        (["inspect", "{other}"], "field 'format' is 'csv'; this command takes 'teraio.trace' and 'teraio.plan'"),
        (["inspect", "{list}"], "field 'format' is None"),
        (["inspect", "{newer}"], "teraio.plan version 2 is not known"),
        (["inspect", "{plan}", "--trace", "{wrap}"], "make a plan from this trace"),
        (["inspect", "{foreign}", "--trace", "{chain}"], "block 3; the blocks of the trace 'chain' are 0 to 2"),
    ],
)
def test_bad_files_and_budgets_end_with_one_line(run: Run, tmp_path: Path, arguments: list[str], message: str) -> None:
    made = planned(tmp_path, "chain", 20)
    move = json.loads(made.read_text())["moves"][0]
    foreign = edited(made, moves=[{**move, "block": 3}]).rename(tmp_path / "foreign.json")
    newer = edited(made, version=2).rename(tmp_path / "newer.json")
    contents = {"damaged": "{oops", "other": '{"format": "csv"}', "list": "[1]"}
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(content)
    paths = {name: tmp_path / f"{name}.json" for name in (*contents, "none")}
    paths |= {"chain": hand("chain"), "wrap": hand("wrap"), "plan": made, "folder": tmp_path}
    paths |= {"foreign": foreign, "newer": newer}
    result = run(*(argument.format(**paths) for argument in arguments))
    assert (result.code, result.out) == (1, "")
    assert message in result.err
    assert result.err.startswith("teraio: ") and result.err.count("\n") == 1 and result.err.endswith("\n")


def test_inspect_tells_how_long_the_drives_last(run: Run, tmp_path: Path) -> None:
    """10 bytes are written in each iteration of 6 s: 864 kB are written after six days."""
    path = planned(tmp_path, "chain", 20)
    assert fact(run("inspect", path, "--tbw", "864kB").out, "drives last") == "6.0 days of training without a break"
    assert run("inspect", path, "--tbw", "864kB", "--json").json["drive_lifetime_seconds"] == pytest.approx(6 * 86400)
    assert "years of training" in run("inspect", path, "--tbw", "600MB").out
    assert "drives last" not in run("inspect", path).out
    assert "drives last" not in run("inspect", planned(tmp_path, "chain", 30), "--tbw", "600TB").out, "nothing is written"
    wrong = run("inspect", hand("chain"), "--tbw", "600TB")
    assert wrong.code == 2 and "only a plan tells what is written" in wrong.err


def test_inspect_tells_which_stages_wait(run: Run, tmp_path: Path) -> None:
    path = planned(tmp_path, "chain", 10)
    named = run("inspect", path, "--trace", hand("chain"), "--json").json
    assert sum(stall["stall_seconds"] for stall in named["stalls"]) == pytest.approx(named["predicted"]["stall_seconds"])
    assert named["predicted"]["stall_seconds"] > 0
    assert "stages that wait" in run("inspect", path, "--trace", hand("chain")).out
    assert run("inspect", path, "--json").json["stalls"] is None


# compare and sweep


def test_compare_shows_every_policy_beside_the_bound(run: Run) -> None:
    result = run("compare", hand("chain"), "--device", 20)
    assert result.code == 0 and fact(result.out, "no plan is faster than") == "6.00 s"
    rows = {line.split()[0]: line.split()[1:3] for line in result.out.splitlines() if " s " in line}
    assert rows["belady"] == ["8.00", "s"] and rows["ilp"] == rows["teraio"] == rows["g10"] == ["6.00", "s"]
    assert "keep-all" in result.out and "stage 'forward/2' needs 30 bytes at once" in result.out


def test_compare_as_json(run: Run) -> None:
    found = run("compare", hand("chain"), "--device", 20, "--json")
    verdicts = {verdict["policy"]: verdict for verdict in found.json["verdicts"]}
    assert list(verdicts) == list(POLICIES)
    best = min(v["predicted"]["iteration_seconds"] for v in verdicts.values() if v["predicted"])
    assert verdicts["ilp"]["predicted"]["iteration_seconds"] == best >= found.json["lower_bound_seconds"]


def test_compare_chosen_policies_only(run: Run) -> None:
    found = run("compare", hand("chain"), "--device", 20, "--policy", "belady", "--policy", "g10", "--json").json
    assert [verdict["policy"] for verdict in found["verdicts"]] == ["belady", "g10"]


def test_sweep_is_never_slower_with_more_memory(run: Run) -> None:
    for policy in ("ilp", "zero-infinity"):
        found = run("sweep", hand("chain"), "--device", "5:40:8", "--policy", policy, "--json").json
        sizes = [point["device_bytes"] for point in found["points"]]
        assert sizes == [5, 10, 15, 20, 25, 30, 35, 40]
        lowest = found["points"][0]
        assert found["floor_bytes"] == 10 and lowest["predicted"] is None and "10 bytes" in lowest["error"]
        seconds = [point["predicted"]["iteration_seconds"] for point in found["points"][1:]]
        assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1] >= found["ideal_seconds"]
        assert all(point["planned_for_bytes"] <= point["device_bytes"] for point in found["points"][1:])


def test_sweep_as_a_table(run: Run) -> None:
    result = run("sweep", hand("chain"), "--device", "10:30:3")
    assert result.code == 0 and fact(result.out, "floor (smallest budget)") == "10 B"
    assert re.search(r"^ *20 B +6\.00 s +0\.0%", result.out, re.MULTILINE)


@pytest.mark.parametrize(
    ("command", "arguments", "code", "message"),
    [
        ("compare", ["--device", "20", "--policy", "luck"], 2, "policy 'luck' is not known"),
        ("compare", ["--device", "1"], 1, "no policy finds a plan: the device budget of 1 bytes is too small"),
        ("sweep", ["--device", "1:2:2"], 1, "no budget of the range suffices: the device budget of 2 bytes"),
        ("sweep", ["--device", "20"], 2, "wanted LOWEST:HIGHEST:COUNT"),
        ("sweep", ["--device", "10:20:1"], 2, "with a count from 2 to 1000"),
        ("sweep", ["--device", "10:20:" + "9" * 5000], 2, "with a count from 2 to 1000"),
        ("sweep", ["--device", "10:" + "9" * 400 + ":2"], 2, "bytes at the most"),
        ("sweep", ["--device", "20:10:3"], 2, "20 is not less than 10"),
        ("sweep", ["--device", "10:20:3", "--policy", "luck"], 2, "policy 'luck' is not known"),
        ("sweep", ["--device", "10:20:3", "--time-limit", "0"], 2, "option --time-limit: found 0.0"),
        ("sweep", ["--device", "10:20:3", "--gap", "2"], 2, "option --gap: found 2.0"),
        ("compare", ["--device", "20", "--threads", "0"], 2, "option --threads: found 0"),
        ("compare", ["--device", "20", "--write-weight", "nan"], 2, "option --write-weight: found nan"),
    ],
)
def test_comparisons_that_can_not_be_made(run: Run, command: str, arguments: list[str], code: int, message: str) -> None:
    result = run(command, hand("chain"), *arguments)
    assert (result.code, result.out) == (code, "")
    assert message in result.err and result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "plenty"], "option --device: found 'plenty', wanted a number of bytes from 1 to 2^63 - 1"),
        (["--device", "-5"], "option --device: found '-5'"),
        (["--device", "20", "--host", "0.5"], "option --host: found '0.5'"),
        (["--device", "20", "--storage", "1 parsec"], "option --storage: found '1 parsec'"),
        (
            ["--device", "20", "--policy", "luck"],
            "policy 'luck' is not known; the policies are: ilp, offload-only, checkpoint, teraio",
        ),
        (["--device", "20", "--time-limit", "0"], "option --time-limit: found 0.0"),
        (["--device", "20", "--time-limit", "nan"], "option --time-limit: found nan"),
        (["--device", "9300000TB"], "option --device: found '9300000TB', wanted a number of bytes from 1 to 2^63 - 1"),
        (["--device", "9" * 5000], "9999… (5,000 characters)', wanted 9,223,372,036,854,775,807 bytes at the most"),
        (["--device", "20", "--gap", "1"], "option --gap: found 1.0, wanted a share of at least 0"),
        (["--device", "20", "--gap", "-0.1"], "option --gap: found -0.1"),
        (["--device", "20", "--gap", "nan"], "option --gap: found nan"),
        (["--device", "20", "--threads", "0"], "option --threads: found 0, wanted a number from 1"),
        (["--device", "20", "--threads", "1000000"], "option --threads: found 1000000"),
        (["--device", "20", "--write-weight", "-1"], "option --write-weight: found -1.0"),
        (["--device", "20", "--write-weight", "inf"], "option --write-weight: found inf"),
        (["--device", "20", "-o", "/nowhere/plan.json"], "there is no directory /nowhere; create it first"),
        (["--device", "20", "--rows", "-1"], "--rows"),
        (["--device", "20", "--colour"], "--colour"),
        ([], "--device"),
    ],
)
def test_wrong_usage_ends_with_two(run: Run, arguments: list[str], message: str) -> None:
    result = run("plan", hand("chain"), *arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err and "Traceback" not in result.err


def test_other_wrong_usage_ends_with_two(run: Run) -> None:
    own = run("inspect", hand("chain"), "--trace", hand("chain"))
    assert own.code == 2 and "is a trace itself" in own.err
    assert run("schema", "model").code == run("dance").code == 2


def test_a_plan_that_cannot_be_made_leaves_the_old_file_alone(run: Run, tmp_path: Path) -> None:
    path = planned(tmp_path, "chain", 20)
    before = path.read_bytes()
    assert run("plan", hand("chain"), "--device", "9", "-o", path).code == 1
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


# without torch


def test_no_command_needs_torch(tmp_path: Path) -> None:
    path = planned(tmp_path, "chain", 20)
    commands = [
        ["plan", str(hand("chain")), "--device", "20"],
        ["simulate", str(hand("chain")), str(path)],
        ["inspect", str(path)],
        ["schema", "plan"],
        ["--version"],
    ]
    program = f"""
import sys
from teraio import cli
for arguments in {commands!r}:
    sys.argv = ["teraio", *arguments]
    try:
        cli.main()
    except SystemExit as ended:
        assert not ended.code, (arguments, ended.code)
sys.exit("torch was imported" if "torch" in sys.modules else 0)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=TRACES.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# numbers


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (67_108_864, "64.0 MiB"), (1.5 * 2**40, "1.50 TiB")],
)
def test_format_bytes(size_bytes: float, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (1.5, "1.50 s"), (123.4, "123 s"), (0.064, "64.0 ms"), (3e-6, "3.00 µs"), (2e-9, "2 ns")],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
