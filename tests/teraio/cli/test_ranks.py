"""The commands with --ranks: what they print and write for a machine, and how they refuse."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner import Node, NodeRate, Plan, Trace, simulate_node
from teraio.cli import commands as cli

TRACES = Path(__file__).parents[3] / "traces"
CHAIN = TRACES / "hand" / "chain.json"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process; returns exit code, output and errors."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer replaces it

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["teraio", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def traces(tmp_path: Path) -> list[Path]:
    """Two ranks: the hand-made chain, and the same with faster stages."""
    chain = Trace.load(CHAIN)
    quick = chain.rebuilt(name="quick", stages=[s.model_copy(update={"duration_seconds": 0.5}) for s in chain.stages])
    paths = [tmp_path / f"trace-rank{rank}.json" for rank in range(2)]
    for path, trace in zip(paths, (chain, quick), strict=True):
        trace.save(path)
    return paths


def as_json(run: Run, *arguments: object) -> Any:
    code, out, err = run(*arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_ranks_are_planned_together_and_replayed_as_predicted(run: Run, traces: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "plan-rank{rank}.json"
    found = as_json(run, "plan", *traces, "--ranks", "--shared", "storage", "--device", "10", "-o", output)
    plans = [tmp_path / f"plan-rank{rank}.json" for rank in range(2)]
    made = [Plan.load(path) for path in plans]
    assert all(each.predicted and each.predicted.iteration_seconds == found["iteration_seconds"] for each in made)
    assert found["iteration_seconds"] <= found["apart_seconds"] and found["ranks"][0]["alone_seconds"] == 10.0
    again = as_json(run, "simulate", *traces, *plans, "--ranks", "--shared", "storage")
    assert again["iteration_seconds"] == found["iteration_seconds"]
    assert [each["links"] for each in again["shared"]] == [["device->storage"], ["storage->device"]]
    assert 0 < again["shared"][0]["busy_share"] <= 1
    alone = as_json(run, "simulate", *traces, *plans, "--ranks")
    assert alone["iteration_seconds"] <= again["iteration_seconds"] and alone["shared"] == []


def test_equal_ranks_have_one_file(run: Run, tmp_path: Path) -> None:
    output, node = tmp_path / "plan.json", tmp_path / "node.json"
    drive = NodeRate(name="drive", links=("device->storage", "storage->device"), bytes_per_second=20.0)
    Node(name="four", ranks=4, shared=(drive,)).save(node)
    code, out, err = run("plan", CHAIN, "--ranks", "--node", node, "--device", "10", "-o", output)
    assert (code, err) == (0, "")
    assert "machine" in out and "four" in out and "planned apart" in out and "0-3" in out
    made = Plan.load(output)
    timeline = simulate_node(Node.load(node), [Trace.load(CHAIN)] * 4, [made] * 4)
    code, out, _ = run("simulate", CHAIN, output, "--ranks", "--node", node)
    assert code == 0 and f"{timeline.iteration_seconds:.1f} s" in out


def test_inspect_shows_the_ranks_side_by_side(run: Run, traces: list[Path]) -> None:
    found = as_json(run, "inspect", *traces, "--ranks", "--shared", "storage")
    assert [rank["trace"] for rank in found["ranks"]] == ["chain", "quick"]
    assert [rank["floor_bytes"] for rank in found["ranks"]] == [10, 10]
    code, out, _ = run("inspect", *traces, "--ranks")
    assert code == 0 and "the ranks share no rate" in out and "quick" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", CHAIN, CHAIN, "--device", "10"), "found 2 files, wanted TRACE; several ranks of one machine take --ranks"),
        (("plan", CHAIN, "--device", "10", "--shared", "storage"), "option --shared is for several ranks: add --ranks"),
        (("simulate", CHAIN), "found 1 file, wanted TRACE PLAN"),
        (("simulate", CHAIN, "--ranks"), "found no plan; give the plan of each rank"),
        (("inspect", CHAIN, "--ranks", "--trace", CHAIN), "options --trace and --tbw are for one plan"),
    ],
)
def test_wrong_usage_says_what_to_do(run: Run, arguments: tuple[object, ...], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and message in err


def test_files_that_do_not_fit_are_refused(run: Run, traces: list[Path], tmp_path: Path) -> None:
    node = tmp_path / "node.json"
    Node(name="three", ranks=3).save(node)
    code, _, err = run("plan", *traces, "--ranks", "--node", node, "--device", "10")
    assert code == 2 and "found 2 traces for 3 ranks; give one each, or one for all" in err
    code, _, err = run("plan", *traces, "--ranks", "--device", "10", "-o", tmp_path / "plan.json")
    assert code == 2 and "put {rank} into the name plan.json" in err
    code, _, err = run("plan", *traces, node, "--ranks", "--device", "10")
    assert code == 1 and "--ranks takes traces and plans" in err
    assert run("plan", *traces, "--ranks", "--node", node, "--shared", "host", "--device", "10")[0] == 2


def test_the_time_in_collectives_is_told_apart(run: Run, traces: list[Path]) -> None:
    """Rank 1 comes first and waits for 0.25 s, in the first stage."""
    for path, seconds in zip(traces, (0.125, 0.375), strict=True):
        trace = Trace.load(path)
        first, *others = trace.stages
        trace.rebuilt(stages=[first.model_copy(update={"collective_seconds": seconds}), *others]).save(path)
    ranks = as_json(run, "inspect", *traces, "--ranks")["ranks"]
    assert [(each["collective_seconds"], each["waited_for_ranks_seconds"]) for each in ranks] == [(0.125, 0.0), (0.375, 0.25)]
    _, out, _ = run("inspect", *traces, "--ranks")
    assert "of that waiting" in out and "250 ms" in out
    _, out, _ = run("inspect", traces[1])
    assert "of that in collectives" in out and "375 ms" in out
    assert as_json(run, "inspect", traces[1])["collective_seconds"] == 0.375


def test_without_collectives_there_is_no_word_of_them(run: Run, traces: list[Path]) -> None:
    assert "collectives" not in run("inspect", *traces, "--ranks")[1] + run("inspect", traces[0])[1]
