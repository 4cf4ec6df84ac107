"""What the structured trace tells of a plan; read back as tlparse reads it."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch._logging._internal import LazyTraceHandler, TorchLogsFormatter, trace_log

import planner
from teraio.planning.plan_files import record_plan, summary

from ...training import MIB, mean_square_step, random_rows, weights_of_1_mib


@dataclass(frozen=True)
class Written:
    """The folder of a structured trace, as TORCH_TRACE names it."""

    folder: Path

    def artifacts(self, name: str) -> list[tuple[str, str]]:
        """Encoding and payload of each artifact of this name. A payload's lines follow its record, each after a tab."""
        (log,) = self.folder.glob("dedicated_log_torch_trace_*.log")
        found: list[tuple[str, str]] = []
        wanted = False
        for line in log.read_text().splitlines():
            if line.startswith("\t"):
                if wanted:
                    encoding, payload = found.pop()
                    found.append((encoding, payload + line[1:] + "\n"))
                continue
            _, _, record = line.partition("] ")
            artifact = json.loads(record).get("artifact", {})
            if wanted := artifact.get("name") == name:
                found.append((artifact["encoding"], ""))
        return found


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Written]:
    """The handler that PyTorch installs at its import if TORCH_TRACE is set."""
    folder = tmp_path / "structured"
    folder.mkdir()
    handler = LazyTraceHandler(str(folder))
    handler.setFormatter(TorchLogsFormatter(trace=True))
    handler.setLevel(logging.DEBUG)
    before = list(trace_log.handlers), trace_log.level
    trace_log.handlers[:] = [handler]
    trace_log.setLevel(logging.DEBUG)
    yield Written(folder)
    trace_log.handlers[:], trace_log.level = before
    handler.close()


def example() -> tuple[planner.Plan, planner.Trace]:
    trace = planner.Trace.load(next((Path(__file__).parents[3] / "traces" / "hand").glob("chain*.json")))
    floor_bytes, _ = planner.floor(trace)
    return planner.plan(trace, planner.Budgets(device_bytes=floor_bytes), policy="zero-infinity"), trace


def test_the_plan_is_an_artifact_of_json(written: Written) -> None:
    plan, trace = example()
    record_plan(plan, trace)
    ((encoding, payload),) = written.artifacts("teraio_plan")
    assert encoding == "json"
    assert planner.Plan.model_validate_json(payload) == plan


def test_its_summary_is_an_artifact_of_text(written: Written) -> None:
    plan, trace = example()
    record_plan(plan, trace)
    ((encoding, payload),) = written.artifacts("teraio_plan_summary")
    assert (encoding, payload.rstrip("\n")) == ("string", summary(plan, trace))


def test_the_summary_tells_what_was_decided_and_what_it_promises() -> None:
    plan, trace = example()
    text = summary(plan, trace)
    assert plan.moves and plan.predicted is not None
    assert f"device budget: {plan.budgets.device_bytes:,} bytes" in text and "host budget: no limit" in text
    assert f"moves: {len(plan.moves)}, " in text
    assert f"predicted iteration: {plan.predicted.iteration_seconds:.6f} s" in text
    assert f"move: {trace.blocks[plan.moves[0].block].name}, " in text


def test_without_a_structured_trace_nothing_is_formatted(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, trace = example()
    monkeypatch.setattr(trace_log, "handlers", [])
    monkeypatch.setattr(planner.Plan, "model_dump", lambda *_, **__: pytest.fail("formatted"))
    record_plan(plan, trace)


def test_a_run_records_the_plan_that_it_follows(written: Written, tmp_path: Path) -> None:
    plan_path = tmp_path / "plan.json"
    options = {
        "memory_budget": 10 * MIB,
        "storage": tmp_path,
        "profile_iterations": 1,
        "plan_out": plan_path,
    }
    training = weights_of_1_mib(options, count=12)
    training.run(random_rows(6), functools.partial(mean_square_step, training), planned=True)
    assert training.progress[-1][0].phase == "planned"
    plans = written.artifacts("teraio_plan")
    assert planner.Plan.model_validate_json(plans[-1][1]) == planner.Plan.load(plan_path)
    assert len(written.artifacts("teraio_plan_summary")) == len(plans)
