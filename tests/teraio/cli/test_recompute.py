"""What `inspect` and `simulate` tell about recomputation."""

import json
import re

import pytest

from planner import Budgets, NotRecomputed, Trace, plan, simulate
from teraio.cli.plan_summary import summarise_plan
from teraio.cli.plan_tables import plan_tables, replay_tables
from teraio.cli.replay_summary import summarise_replay
from teraio.cli.tables import Page, show
from teraio.cli.trace_summary import summarise_trace
from teraio.cli.trace_tables import trace_tables

from ...planner.recompute_traces import layers


@pytest.fixture
def trace() -> Trace:
    """Three layers over a link of 1 byte per second; at a budget of 31 bytes the first one runs again."""
    reasons = (NotRecomputed(stage=1, reason="it draws random numbers"), NotRecomputed(stage=2, reason="it draws random numbers"))
    return layers(rate=1.0).model_copy(update={"not_recomputed": reasons})


def shown(page: Page, capsys: pytest.CaptureFixture[str]) -> str:
    show(page)
    return capsys.readouterr().out


def test_a_plan_tells_why_a_stage_runs_again(trace: Trace, capsys: pytest.CaptureFixture[str]) -> None:
    made = plan(trace, Budgets(device_bytes=31))
    summary = summarise_plan(made, trace)
    text = shown(plan_tables(summary, 10), capsys)
    assert re.search(r"^recomputed +1 forward stages, 10 B: 1\.00 s in place of 20\.0 s of copies$", text, re.M)
    assert re.search(r"^ +0 +0 forward/0 +5 backward/0 +10 B +1\.00 s +20\.0 s$", text, re.M)
    assert re.search(r"^recomputation +1\.00 s$", text, re.M)
    assert json.loads(summary.model_dump_json())["reruns"][0]["copy_seconds"] == 20.0
    alone = shown(plan_tables(summarise_plan(made), 10), capsys)
    assert re.search(r"^recomputed +1 forward stages$", alone, re.M) and re.search(r"^ +0 +5$", alone, re.M)


def test_moves_and_stalls_are_numbered_with_the_stages_that_run_again(trace: Trace, capsys: pytest.CaptureFixture[str]) -> None:
    fast = layers(rate=10.0)
    made = plan(fast, Budgets(device_bytes=31), policy="checkpoint")
    assert len(made.recompute) == 1 and made.moves
    text = shown(plan_tables(summarise_plan(made, fast), 10), capsys)
    assert re.search(r"^ +2 +2 forward/2 +3 backward/2 ", text, re.M), "in the numbers of the trace"
    assert re.search(r"^[01] a[01] .* [56] backward/[01] ", text, re.M), "later stages are one further"
    replay = summarise_replay(fast, made, simulate(fast, made))
    assert replay.recompute_seconds == 1.0
    assert re.search(r"^recomputation +1\.00 s$", shown(replay_tables(replay, 10), capsys), re.M)


def test_a_trace_tells_what_can_run_again_and_what_not(trace: Trace, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(trace_tables(summarise_trace(trace), 10), capsys)
    assert re.search(r"^can be recomputed +30 B by 3 stages, in 3\.00 s \(to copy out and in: 60\.0 s\)$", text, re.M)
    assert re.search(r"^it draws random numbers +2 +forward/1$", text, re.M)
    without = trace.model_copy(update={"recompute": (), "not_recomputed": ()})
    assert "recomputed" not in shown(trace_tables(summarise_trace(without), 10), capsys)
