"""The command line, on the hand-made traces: what it makes and compares, what it needs, and how it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import planner
import teraio
from planner import Budgets, Plan, Trace, plan
from teraio.cli import commands, output

from ..conftest import Result, RunCommand
from ..traces import CHAIN_FILE, TRACES, edited, fact, file_of, has_line, planned

# -- plan


def test_plan_writes_what_it_tells(run: RunCommand, tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    result = run("plan", CHAIN_FILE, "--device", "20", "-o", path)
    assert (result.code, result.err) == (0, "")
    written = Plan.load(path)
    assert written.predicted is not None and written.predicted.iteration_seconds == 6.0
    assert fact(result.out, "iteration") == "6.00 s" and fact(result.out, "peak of device") == "20 B"
    assert fact(result.out, "moves").startswith("1 of 1 blocks, 0 without a copy out")
    assert fact(result.out, "moved device->storage") == fact(result.out, "moved storage->device") == "10 B"
    assert has_line(result.out, r"0 activation\.0 +10 B +storage +0 forward/0 +5 backward/0 +0 +4 +10 B +2 forward/2")
    printed = run("plan", CHAIN_FILE, "--device", "20", "--json", "--output", path).json
    assert printed == json.loads(path.read_text())
    before = path.read_bytes()
    assert run("plan", CHAIN_FILE, "--device", "9", "-o", path).code == 1
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path], "without a plan the old file stays as it is"
    roomy = run("plan", CHAIN_FILE, "--device", "1GiB")
    assert roomy.code == 0 and fact(roomy.out, "moves").startswith("0 of 0 blocks") and "copy out  copy in" not in roomy.out


def test_budgets_and_policy_reach_the_plan(run: RunCommand) -> None:
    """A tier with a budget of nothing is not used."""
    budgets = ("--device", "0.02KB", "--host", "1 KiB", "--storage", "1GiB")
    found = run("plan", CHAIN_FILE, *budgets, "--policy", "belady", "--json").json
    assert found["budgets"] == {"device_bytes": 20, "host_bytes": 1024, "storage_bytes": 1 << 30}
    assert found["policy"] == "belady"
    for none, used in (("--host", "storage"), ("--storage", "host")):
        found = run("plan", file_of("two_tiers"), "--device", "20", none, "0", "--json").json
        assert {move["tier"] for move in found["moves"]} == {used}
    asked = run("advise", file_of("two_tiers"), "--device", "20", "--host", "0", "--json").json
    assert "twice the host memory" not in {answer["what"] for answer in asked["answers"]}


SOLVER_OPTIONS = ["--time-limit", "7", "--threads", "3", "--write-weight", "0.5"]


@pytest.mark.parametrize(("command", "device"), [("plan", "20"), ("sweep", "20:30:2")])
def test_what_the_solver_may_take_reaches_it(run: RunCommand, monkeypatch: pytest.MonkeyPatch, command: str, device: str) -> None:
    given: list[dict[str, object]] = []

    def spy(traced: Trace, budgets: Budgets, **keywords: object) -> Plan:
        given.append({name: value for name, value in keywords.items() if name != "incumbents"})
        return plan(traced, budgets, policy="belady")

    monkeypatch.setattr(planner, "plan", spy)
    assert run(command, CHAIN_FILE, "--device", device, "--policy", "g10", *SOLVER_OPTIONS).code == 0
    wanted = {"policy": "g10", "time_limit_seconds": 7.0, "gap": 0.005, "threads": 3, "write_weight": 0.5}
    assert given and all(keywords == wanted for keywords in given)
    given.clear()
    assert run(command, CHAIN_FILE, "--device", device).code == 0
    assert given[0] == {"policy": "ilp", "time_limit_seconds": 120.0, "gap": 0.005, "threads": 2, "write_weight": 0.005}
    text = " ".join(run(command, "--help").out.replace("│", "").split())
    assert "─ Solver ─" in text and f"Example: teraio {command} trace.json --device" in text
    assert "drives wear out too soon" in text and "0.005" in text and "Threads that the solver may use" in text


# -- sweep


@pytest.mark.parametrize("policy", ["ilp", "zero-infinity"])
def test_sweep_is_never_slower_with_more_memory(run: RunCommand, policy: str) -> None:
    found = run("sweep", CHAIN_FILE, "--device", "5:40:8", "--policy", policy, "--json").json
    lowest, *points = found["points"]
    assert [point["device_bytes"] for point in found["points"]] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert found["floor_bytes"] == 10 and lowest["predicted"] is None and "10 bytes" in lowest["error"]
    seconds = [point["predicted"]["iteration_seconds"] for point in points]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1] >= found["ideal_seconds"]
    assert all(point["planned_for_bytes"] <= point["device_bytes"] for point in points)


WORK = {"tokens": 12_000, "samples": 3, "flops": 3e15, "peak_flops_per_second": 1e15}


def test_rates_stand_beside_every_time_of_an_iteration(run: RunCommand, tmp_path: Path) -> None:
    """The work of a trace is for people: it can be added to a file, whose fingerprint and plans stay valid."""
    traced, made, page = tmp_path / "trace.json", tmp_path / "plan.json", tmp_path / "page.html"
    traced.write_text(json.dumps({**json.loads(CHAIN_FILE.read_text()), "work": WORK}))
    rates = "6.00 s, 2,000 tokens/s, 0.50 samples/s, 500 TFLOP/s, 50.0% MFU"
    assert run("plan", CHAIN_FILE, "--device", 20, "-o", made).code == 0
    assert "TFLOP" not in run("simulate", CHAIN_FILE, made).out
    commands = {
        "without waiting": ("inspect", traced),
        "iteration": ("plan", traced, "--device", 20),
        "iteration ": ("inspect", made, "--trace", traced),
        "iteration  ": ("simulate", traced, made),
    }
    assert {fact(run(*command).out, name.strip()) for name, command in commands.items()} == {rates}
    row = r" +2,000 +0\.50 +500 +50\.0%"
    assert has_line(run("advise", traced, "--device", 20).out, rf"as asked +yes +6\.00 s +6\.00 s +1\.00x{row} .*")
    asked = {answer["what"]: answer for answer in run("advise", traced, "--device", 20, "--json").json["answers"]}
    assert asked["twice the batch"]["work"] == {**WORK, "tokens": 24_000, "samples": 6, "flops": 6e15}
    assert run("report", made, "--trace", traced, "--points", 0, "-o", page).code == 0
    assert '<dt>tokens/s</dt><dd>2,000</dd><dd class="faint">0.50 samples/s, 500 TFLOP/s, 50.0% MFU</dd>' in page.read_text()


def test_every_step_that_may_take_long_has_its_line(run: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []

    @contextlib.contextmanager
    def noting(what: str) -> Iterator[Callable[[str], None]]:
        said.append(what)
        yield said.append

    monkeypatch.setattr(commands, "working", noting)
    made, page = tmp_path / "plan.json", tmp_path / "page.html"
    assert run("plan", CHAIN_FILE, "--device", 20, "-o", made).code == 0
    assert said == ["reading the trace", "planning", "replaying the plan"]
    said.clear()
    assert run("report", made, "--trace", CHAIN_FILE, "--points", 0, "-o", page).code == 0
    assert said == ["reading plan and trace", "replaying the plan", "writing"]
    said.clear()
    assert run("sweep", CHAIN_FILE, "--device", "20MiB:40MiB:2").code == 0
    assert said[1:] == ["planning for 20.0 MiB (20,971,520 bytes), 1 of 2", "planning for 40.0 MiB (41,943,040 bytes), 2 of 2"]


# -- schema, help, version


def test_schema_help_and_version(run: RunCommand) -> None:
    for kind in ("trace", "plan"):
        assert run("schema", kind).json == json.loads((TRACES / f"{kind}.schema.json").read_text())
    helped = run("--help")
    assert helped.code == 0
    assert all(f"│ {command} " in helped.out for command in ("plan", "simulate", "sweep", "inspect", "schema"))
    assert run("--version") == Result(0, f"teraio {teraio.__version__}\n", "")
    assert "--device" in run("plan", "--help").out
    assert run("schema", "model").code == run("dance").code == run().code == 2


# -- terminals and pipes


def test_names_cannot_command_the_terminal(run: RunCommand, tmp_path: Path) -> None:
    content = json.loads(CHAIN_FILE.read_text())
    del content["fingerprint"]
    links = ["device->storage", "storage->device"]
    content["hardware"]["shared"] = [dict(links=links, bytes_per_second=20.0)]
    for entry in (content, content["hardware"], *content["hardware"]["shared"], *content["stages"], *content["blocks"]):
        entry["name"] = "\x1b]0;title\x07\x1b[2J\r\x9b31m\u202eevil\n[red]bold[/red]"
    path, evil = tmp_path / "evil.json", tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    outputs = [run("plan", path, "--device", "10", "-o", evil), run("inspect", path), run("simulate", path, evil)]
    outputs += [run("inspect", evil, "--trace", path), run("plan", path, "--device", "9")]
    outputs += [run("sweep", path, "--device", "9:30:2"), run("inspect", path, "--json")]
    for result in outputs:
        shown = result.out + result.err
        assert "evil" in shown and all(character.isprintable() or character == "\n" for character in shown)
        assert result.out.startswith("{") or "[red]bold[/red]" in shown, "a name is no markup"


def in_a_process(*command: str, **more: object) -> subprocess.CompletedProcess[str]:
    arguments = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 60, **more}
    return subprocess.run([sys.executable, *command], cwd=TRACES.parent, text=True, **arguments)  # type: ignore[call-overload]


def test_an_output_that_is_full() -> None:
    with open("/dev/full", "w") as full:
        done = in_a_process("-m", "teraio.cli", "inspect", str(CHAIN_FILE), stdout=full)
    assert done.returncode == 1
    assert done.stderr == "teraio: the standard output cannot be written: No space left on device\n"


def test_a_terminal_that_lacks_characters(tmp_path: Path) -> None:
    path = tmp_path / "named.json"
    path.write_text(json.dumps({**json.loads(CHAIN_FILE.read_text()), "name": "模型"}))
    terminal = {"PYTHONIOENCODING": "ascii", "FORCE_COLOR": "1", "TERM": "dumb"}
    done = in_a_process("-m", "teraio.cli", "inspect", str(path), env={**os.environ, **terminal})
    assert done.returncode == 0 and "reading the trace" not in done.stderr, "which moves there is one line that goes"
    assert fact(done.stdout, "trace") == "??"


def test_no_command_needs_torch(tmp_path: Path) -> None:
    commands = [
        ["plan", str(CHAIN_FILE), "--device", "20"],
        ["simulate", str(CHAIN_FILE), str(planned(tmp_path, "chain", 20))],
        ["inspect", str(CHAIN_FILE)],
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
    done = in_a_process("-c", program)
    assert done.returncode == 0, done.stderr


# -- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "{chain}", "--device", "9"], "needs 10 B at once; give --device of at least 10 bytes"),
        (
            ["plan", "{chain}", "--device", "10", "--host", "0", "--storage", "0"],
            "needs 30 B at once, as nothing can leave without a lower tier (with one, 10 B would do); give --device of",
        ),
        (["plan", "{chain}", "--device", "10", "--storage", "1"], "raise --storage or --host"),
        (["plan", "{none}", "--device", "20"], "none.json: cannot be read: No such file"),
        (["plan", "{plan}", "--device", "20"], "this reader takes 'teraio.trace' only"),
        (["plan", "{chain}", "--device", "20", "-o", "{folder}"], "cannot be written: Is a directory"),
        (["simulate", "{wrap}", "{plan}"], "make a plan from this trace"),
        (["simulate", "{chain}", "{foreign}"], "block 3"),
        (["inspect", "{damaged}"], "malformed JSON at line 1 column 2"),
        (["inspect", "{other}"], "field 'format' is 'csv'; this command takes 'teraio.trace' and 'teraio.plan'"),
        (["inspect", "{newer}"], "teraio.plan version 2 is not known"),
        (["sweep", "{chain}", "--device", "1:2:2"], "no budget of the range suffices: the device budget of 2 B"),
    ],
)
def test_bad_files_and_budgets_end_with_one_line(run: RunCommand, tmp_path: Path, arguments: list[str], message: str) -> None:
    good = planned(tmp_path, "chain", 20)
    move = json.loads(good.read_text())["moves"][0]
    foreign = edited(good, moves=[{**move, "block": 3}]).rename(tmp_path / "foreign.json")
    newer = edited(good, version=2).rename(tmp_path / "newer.json")
    contents = {"damaged": "{oops", "other": '{"format": "csv"}'}
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(content)
    paths = {name: tmp_path / f"{name}.json" for name in (*contents, "none")}
    paths |= {"chain": CHAIN_FILE, "wrap": file_of("wrap"), "plan": good, "folder": tmp_path, "foreign": foreign, "newer": newer}
    result = run(*(argument.format(**paths) for argument in arguments))
    assert (result.code, result.out) == (1, "") and message in result.err
    assert result.err.startswith("teraio: ") and result.err.count("\n") == 1 and result.err.endswith("\n")


PLAN = ["plan", "--device", "20"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--device", "plenty"], "option --device: found 'plenty', wanted a number of bytes from 1 to 2^63 - 1"),
        (["plan", "--device", "9" * 5000], "9999… (5,000 characters)', wanted 9,223,372,036,854,775,807 bytes at the most"),
        ([*PLAN, "--host", "0.5"], "option --host: found '0.5'"),
        ([*PLAN, "--policy", "luck"], "policy 'luck' is not known; the policies are: ilp, offload-only, checkpoint, teraio"),
        ([*PLAN, "--time-limit", "0"], "option --time-limit: found 0.0"),
        ([*PLAN, "--threads", "0"], "option --threads: found 0"),
        ([*PLAN, "--write-weight", "inf"], "option --write-weight: found inf"),
        ([*PLAN, "-o", "/nowhere/plan.json"], "there is no directory /nowhere; create it first"),
        (["sweep", "--device", "20"], "wanted LOWEST:HIGHEST:COUNT"),
        (["sweep", "--device", "10:20:1"], "with a count from 2 to 1000"),
        (["sweep", "--device", "20:10:2"], "20 is not less than 10"),
        (["inspect", "--trace", str(CHAIN_FILE)], "is a trace itself"),
    ],
)
def test_wrong_usage_ends_with_two(run: RunCommand, arguments: list[str], message: str) -> None:
    command, *options = arguments
    result = run(command, CHAIN_FILE, *options)
    assert (result.code, result.out) == (2, "")
    assert message in result.err and "Traceback" not in result.err


# -- numbers


def test_numbers_for_people() -> None:
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1.00 KiB", 67_108_864: "64.0 MiB", 1.5 * 2**40: "1.50 TiB"}
    assert [output.format_bytes(size) for size in sizes] == list(sizes.values())
    times = {0.0: "0 s", 1.5: "1.50 s", 123.4: "123 s", 0.064: "64.0 ms", 3e-6: "3.00 µs", 2e-9: "2 ns"}
    assert [output.format_seconds(time) for time in times] == list(times.values())


def test_budgets_have_the_units_that_they_were_asked_for_in(run: RunCommand) -> None:
    assert fact(run("plan", CHAIN_FILE, "--device", "6.5GB", "--host", "24GiB").out, "device budget") == "6.5 GB (6.05 GiB)"
    assert fact(run("plan", CHAIN_FILE, "--device", "24GiB").out, "device budget") == "24.0 GiB (25,769,803,776 bytes)"
    swept = run("sweep", CHAIN_FILE, "--device", "1GB:2GB:4", "--policy", "belady").out
    assert re.findall(r"^ *([\d.]+ GB) ", swept, re.MULTILINE) == ["1 GB", "1.333 GB", "1.666 GB", "2 GB"]
