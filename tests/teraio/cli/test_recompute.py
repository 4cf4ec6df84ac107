"""What `inspect` and `simulate` tell about recomputation."""

import re
from pathlib import Path

import pytest

from planner import Budgets, NotRecomputed, Trace, plan

from ...planner.traces import layers
from .conftest import Run


@pytest.fixture
def trace() -> Trace:
    """Three layers over a link of 1 byte per second; at a budget of 31 bytes the first one runs again."""
    reasons = (NotRecomputed(stage=1, reason="it draws random numbers"), NotRecomputed(stage=2, reason="it draws random numbers"))
    return layers(rate=1.0).model_copy(update={"not_recomputed": reasons})


def saved(folder: Path, trace: Trace, policy: str = "ilp") -> tuple[Path, Path]:
    """Return the files of the trace and of a plan for it."""
    trace.save(folder / "trace.json")
    plan(trace, Budgets(device_bytes=31), policy=policy).save(folder / "plan.json")
    return folder / "trace.json", folder / "plan.json"


def test_a_plan_tells_why_a_stage_runs_again(trace: Trace, run: Run, tmp_path: Path) -> None:
    trace_file, plan_file = saved(tmp_path, trace)
    text = run("inspect", plan_file, "--trace", trace_file).out
    assert re.search(r"^recomputed +1 forward stages, 10 B: 1\.00 s in place of 20\.0 s of copies$", text, re.M)
    assert re.search(r"^ +0 +0 forward/0 +5 backward/0 +10 B +1\.00 s +20\.0 s$", text, re.M)
    assert re.search(r"^recomputation +1\.00 s$", text, re.M)
    assert run("inspect", plan_file, "--trace", trace_file, "--json").json["reruns"][0]["copy_seconds"] == 20.0
    alone = run("inspect", plan_file).out
    assert re.search(r"^recomputed +1 forward stages$", alone, re.M) and re.search(r"^ +0 +5$", alone, re.M)


def test_moves_and_stalls_are_numbered_with_the_stages_that_run_again(run: Run, tmp_path: Path) -> None:
    trace_file, plan_file = saved(tmp_path, layers(rate=10.0), policy="checkpoint")
    text = run("inspect", plan_file, "--trace", trace_file).out
    assert re.search(r"^ +2 +2 forward/2 +3 backward/2 ", text, re.M), "in the numbers of the trace"
    assert re.search(r"^[01] a[01] .* [56] backward/[01] ", text, re.M), "later stages are one further"
    assert run("simulate", trace_file, plan_file, "--json").json["recompute_seconds"] == 1.0
    assert re.search(r"^recomputation +1\.00 s$", run("simulate", trace_file, plan_file).out, re.M)


def test_a_trace_tells_what_can_run_again_and_what_not(trace: Trace, run: Run, tmp_path: Path) -> None:
    trace_file, _ = saved(tmp_path, trace)
    text = run("inspect", trace_file).out
    assert re.search(r"^can be recomputed +30 B by 3 stages, in 3\.00 s \(to copy out and in: 60\.0 s\)$", text, re.M)
    assert re.search(r"^it draws random numbers +2 +forward/1$", text, re.M)
    trace.rebuilt(recompute=(), not_recomputed=()).save(trace_file)
    assert "recomputed" not in run("inspect", trace_file).out
