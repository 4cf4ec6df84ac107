"""Planning in the background: a process of its own, which may fail, be slow or be cancelled without harm."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import planner
from teraio.planning import PlanningJob
from teraio.planning import background as planning

SECONDS = 60


def trace(*, links: bool = True) -> planner.Trace:
    """Three stages; a block is idle during the second, which leaves no room for it."""
    pairs = [("device", "storage"), ("storage", "device")] if links else []
    return planner.Trace.model_validate(
        {
            "name": "three",
            "hardware": {
                "name": "made up",
                "device_memory_bytes": 100,
                "links": [{"from": a, "to": b, "bytes_per_second": 100.0, "latency_seconds": 0.0} for a, b in pairs],
            },
            "stages": [
                {"id": n, "name": f"s{n}", "phase": "forward", "duration_seconds": 1.0, "workspace_bytes": w}
                for n, w in enumerate((0, 60, 0))
            ],
            "blocks": [
                {
                    "id": 0,
                    "name": "w",
                    "kind": "parameter",
                    "size_bytes": 50,
                    "persistent": True,
                    "reads": [0, 2],
                    "writes": [2],
                },
            ],
        }
    )


def job(given: planner.Trace, device_bytes: int, **more: Any) -> PlanningJob:
    return PlanningJob(given, planner.Budgets(device_bytes=device_bytes, **more), time_limit_seconds=10)


def test_a_plan() -> None:
    threads = threading.active_count()
    work = job(trace(), 80)
    assert work.wait(SECONDS) and work.done
    plan = work.result()
    assert plan.trace_fingerprint == trace().fingerprint and plan.budgets.device_bytes == 80
    assert [move.block for move in plan.moves] == [0]
    planner.simulate(trace(), plan)
    work.cancel()
    assert work.result() is plan and threading.active_count() == threads


def test_no_plan_is_possible() -> None:
    work = job(trace(), 59)
    assert work.wait(SECONDS)
    with pytest.raises(planner.SolverError, match="s1"):
        work.result()


def test_waiting_for_a_while() -> None:
    work = job(trace(), 80)
    began = time.monotonic()
    assert not work.wait(0.0)
    assert time.monotonic() - began < 5
    assert work.wait(SECONDS)


def slow_worker(monkeypatch: pytest.MonkeyPatch, code: str = "import time; time.sleep(600)") -> list[subprocess.Popen[str]]:
    """The planning process runs `code` instead."""
    started: list[subprocess.Popen[str]] = []
    real = subprocess.Popen

    def start(command: list[str], **arguments: Any) -> subprocess.Popen[str]:
        started.append(real([sys.executable, "-c", code], **arguments))
        return started[-1]

    monkeypatch.setattr(planning.subprocess, "Popen", start)
    return started


def test_cancelling(monkeypatch: pytest.MonkeyPatch) -> None:
    started = slow_worker(monkeypatch)
    work = job(trace(), 80)
    while not started:
        time.sleep(0.01)
    work.cancel()
    assert work.done and started[0].poll() is not None
    with pytest.raises(planner.SolverError):
        work.result()


def test_cancelling_at_once_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started = slow_worker(monkeypatch)
    work = job(trace(), 80)
    work.cancel()
    assert work.done and all(process.poll() is not None for process in started)


def test_a_solver_that_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    started = slow_worker(monkeypatch)
    work = PlanningJob(trace(), planner.Budgets(device_bytes=80), time_limit_seconds=0.1, grace_seconds=0.2)
    assert work.wait(SECONDS)
    with pytest.raises(planner.SolverError, match="solver_time_limit"):
        work.result()
    assert started[0].poll() is not None


def test_a_process_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_worker(monkeypatch, "import sys; sys.exit('out of memory')")
    work = job(trace(), 80)
    assert work.wait(SECONDS)
    with pytest.raises(planner.SolverError, match="out of memory"):
        work.result()


def test_a_process_that_can_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **more: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(planning.subprocess, "Popen", refuse)
    work = job(trace(), 80)
    assert work.wait(SECONDS)
    with pytest.raises(planner.SolverError, match="could not be started"):
        work.result()


def test_a_process_that_writes_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_worker(monkeypatch, "")
    work = job(trace(), 80)
    assert work.wait(SECONDS)
    with pytest.raises(planner.TeraioError):
        work.result()


def test_no_memory_for_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, text: str) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(Path, "write_text", refuse)
    work = job(trace(), 80)
    assert work.wait(SECONDS)
    with pytest.raises(planner.SolverError, match="Cannot allocate memory"):
        work.result()


def test_nothing_lies_in_the_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What lies there would stay if the process is killed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started = slow_worker(monkeypatch)
    work = job(trace(), 80)
    while not started:
        time.sleep(0.01)
    assert not list(tmp_path.iterdir())
    work.cancel()
