"""The command line, on the hand-made traces: what it prints, what it writes, and how it refuses."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import teraio
from planner import Budgets, Plan, Trace, plan
from planner.plan import SolverReport
from planner.policies import POLICIES
from teraio import cli
from teraio.tables import format_bytes, format_seconds

TRACES = Path(__file__).parents[2] / "traces"


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.err == ""
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process as the console script would."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer replaces it

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["teraio", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return Result(int(ended.value.code or 0), captured.out, captured.err)

    return call


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
    assert re.search(r"^0 activation\.0 +10 B +storage +0 forward/0 +5 backward/0 +0 +4$", result.out, re.M)


def test_plan_as_json_is_the_plan_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    printed = run("plan", hand("chain"), "--device", "20", "--json", "--output", path).json
    assert printed == json.loads(path.read_text())


def test_budgets_and_policy_reach_the_plan(run: Run) -> None:
    budgets = ("--device", "0.02KB", "--host", "1 KiB", "--storage", "1GiB")
    made = run("plan", hand("chain"), *budgets, "--policy", "belady", "--json").json
    assert made["budgets"] == {"device_bytes": 20, "host_bytes": 1024, "storage_bytes": 1 << 30}
    assert made["policy"] == "belady"


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


def test_inspect_a_trace(run: Run) -> None:
    text = run("inspect", hand("clean_and_dirty")).out
    assert fact(text, "trace") == "clean_and_dirty" and fact(text, "iteration without waiting") == "4.00 s"
    assert fact(text, "floor (smallest budget)") == "20 B, set by use"
    assert re.search(r"^backward +1 +1\.00 s$", text, re.M)
    assert re.search(r"^parameter +2 +20 B +20 B$", text, re.M)
    assert re.search(r"^device->storage +10 B/s +0 s$", text, re.M)
    assert re.search(r"^ +2 +peak +1\.00 s +15 B +35 B$", text, re.M)
    assert re.search(r"^ +1 +clean +parameter +10 B +0$", text, re.M)


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
    assert re.search(r"^0 weight +10 B +storage +2 update +6 update \(next iteration\) +2 +5$", named, re.M)
    alone = run("inspect", path).out
    assert fact(alone, "plan for") == Trace.load(hand("wrap")).fingerprint
    assert re.search(r"^0 +storage +2 +6 +2 +5$", alone, re.M)
    summary = run("inspect", path, "--json").json
    assert summary["moves"][0]["block_name"] is None and summary["predicted"]["iteration_seconds"] == 4.0


def test_a_dropped_block_is_called_so(run: Run, tmp_path: Path) -> None:
    path = planned(tmp_path, "clean_and_dirty", 25)
    text = run("inspect", path, "--trace", hand("clean_and_dirty")).out
    assert fact(text, "moves").startswith("1 of 1 blocks, 1 without a copy out")
    assert re.search(r"^1 clean .* dropped +\d+$", text, re.M)


def test_what_the_solver_did_not_tell_is_not_shown(run: Run, tmp_path: Path) -> None:
    failed = SolverReport(name="CBC", status="failed").model_dump(mode="json")
    path = edited(planned(tmp_path, "chain", 20), solver=failed, predicted=None)
    text = run("inspect", path).out
    assert fact(text, "solver") == "CBC: failed, 0 s" and "predicted" not in text


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
def test_bad_files_and_budgets_end_with_one_line(
    run: Run, tmp_path: Path, arguments: list[str], message: str
) -> None:
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
        ("sweep", ["--device", "20:10:3"], 2, "20 is not less than 10"),
        ("sweep", ["--device", "10:20:3", "--policy", "luck"], 2, "policy 'luck' is not known"),
        ("sweep", ["--device", "10:20:3", "--time-limit", "0"], 2, "option --time-limit: found 0.0"),
    ],
)
def test_comparisons_that_can_not_be_made(run: Run, command: str, arguments: list[str], code: int, message: str) -> None:
    result = run(command, hand("chain"), *arguments)
    assert (result.code, result.out) == (code, "")
    assert message in result.err and result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "plenty"], "option --device: found 'plenty', wanted a positive number of bytes"),
        (["--device", "-5"], "option --device: found '-5'"),
        (["--device", "20", "--host", "0"], "option --host: found '0'"),
        (["--device", "20", "--storage", "1 parsec"], "option --storage: found '1 parsec'"),
        (["--device", "20", "--policy", "luck"], "policy 'luck' is not known; the policies are: ilp, teraio"),
        (["--device", "20", "--time-limit", "0"], "option --time-limit: found 0.0"),
        (["--device", "20", "--time-limit", "nan"], "option --time-limit: found nan"),
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
