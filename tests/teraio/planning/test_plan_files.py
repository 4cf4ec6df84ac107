"""What is written of a trace and a plan: files, which cannot end a training, and the structured trace, as tlparse reads it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor
from torch._logging._internal import LazyTraceHandler, TorchLogsFormatter, trace_log

import planner
import teraio
from planner import Budgets, Plan, Trace
from runtime.system import frozen
from teraio.planning import plan_files, record_plan, save

from ...training import MIB, mean_square_step, random_rows, weights_of_1_mib
from ..traces import CHAIN

PLAN = planner.plan(CHAIN, Budgets(device_bytes=planner.floor(CHAIN)[0]), policy="zero-infinity")


def test_the_path_is_given_only_if_the_file_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    assert save(CHAIN, path) == path and Trace.load(path).stages == CHAIN.stages
    assert save(CHAIN, None) is None
    with caplog.at_level(logging.WARNING, logger="teraio"):
        assert save(CHAIN, tmp_path / "gone" / "trace.json") is None
    (record,) = caplog.records
    assert "the trace could not be written to" in record.message and "training goes on without" in record.message


# -- the structured trace


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
    before = list(trace_log.handlers), trace_log.level, trace_log.propagate
    trace_log.handlers[:], trace_log.propagate = [handler], False
    trace_log.setLevel(logging.DEBUG)
    yield Written(folder)
    trace_log.handlers[:], trace_log.level, trace_log.propagate = before
    handler.close()


def test_the_plan_and_its_summary_are_artifacts(written: Written) -> None:
    record_plan(PLAN, CHAIN)
    ((encoding, payload),) = written.artifacts("teraio_plan")
    assert encoding == "json" and Plan.model_validate_json(payload) == PLAN
    ((encoding, text),) = written.artifacts("teraio_plan_summary")
    assert (encoding, text.rstrip("\n")) == ("string", plan_files.summary(PLAN, CHAIN))
    assert PLAN.moves and PLAN.predicted is not None
    assert f"device budget: {PLAN.budgets.device_bytes:,} bytes" in text and "host budget: no limit" in text
    assert f"moves: {len(PLAN.moves)}, " in text
    assert f"predicted iteration: {PLAN.predicted.iteration_seconds:.6f} s" in text
    assert f"move: {CHAIN.blocks[PLAN.moves[0].block].name}, " in text


def test_without_a_structured_trace_nothing_is_formatted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_log, "handlers", [])
    monkeypatch.setattr(Plan, "model_dump", lambda *_, **__: pytest.fail("formatted"))
    record_plan(PLAN, CHAIN)


def test_a_run_records_the_plan_that_it_follows(written: Written, tmp_path: Path) -> None:
    """As long as it follows one, Python's collector passes over what training holds for long."""
    options = {"memory_budget": 10 * MIB, "storage": tmp_path, "profile_iterations": 1, "plan_out": tmp_path / "plan.json"}
    training = weights_of_1_mib(options, count=12)
    held: dict[str, list[bool]] = {}

    def step(batch: Tensor, index: int) -> None:
        mean_square_step(training, batch)
        held.setdefault(teraio.status()[-1].phase, []).append(frozen())

    training.run(random_rows(8), step, planned=True)
    assert not any(held["profile"]) and held["planned"] and all(held["planned"])
    plans = written.artifacts("teraio_plan")
    assert Plan.model_validate_json(plans[-1][1]) == Plan.load(tmp_path / "plan.json")
    assert len(written.artifacts("teraio_plan_summary")) == len(plans)
    training.finish()
    assert not frozen()
