"""A real training whose drive turns out slower than measured: its plan is replaced while it trains, and the bits stay."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from planner import Budgets, Plan, Trace, plan
from runtime.transfer import Engine
from teraio.machine import Machine, Shared
from teraio.registry import REGISTRY

from ..in_process import InstantJob
from ..parity.harness import train
from ..recompute.programs import PLAIN, check
from ..virtual import link_rates

pytestmark = pytest.mark.usefixtures("same_program_at_every_budget", "deterministic")

TRAINED = replace(PLAIN, steps=16)
SLOW_READ = 1e6
"""Bytes per second: a block of 1 MiB takes about a second, and all stages together take less, also on a busy machine."""
BUSY_SECONDS = Machine.busy_seconds


def busy_seconds(machine: Machine) -> dict[str, float]:
    """Of reads at `SLOW_READ`: however busy the processor is, no stage is long enough to hide many of them."""
    read = {link: size / SLOW_READ for link, size in machine.moved_bytes().items() if link == "storage->device"}
    return BUSY_SECONDS(machine) | read


class FirstMovesAll:
    """Plans at once: the first plan offloads everything, where the integer program would not."""

    def __init__(self) -> None:
        self.policies = itertools.chain(["zero-infinity"], itertools.repeat("ilp"))

    def __call__(self, trace: Trace, budgets: Budgets, *, time_limit_seconds: float, known: Plan | None = None) -> InstantJob:
        return InstantJob(trace, plan(trace, budgets, policy=next(self.policies), time_limit_seconds=time_limit_seconds))


def test_another_plan_takes_over(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    reference = train(TRAINED)
    budget = int(0.75 * reference.status.device_peak_bytes)
    monkeypatch.setattr(REGISTRY, "parts", dataclasses.replace(REGISTRY.parts, start_job=FirstMovesAll()))
    monkeypatch.setattr(Engine, "measure", lambda engine: link_rates(4e9, 4e9))
    monkeypatch.setattr(REGISTRY, "shared", Shared())
    monkeypatch.setattr(Machine, "busy_seconds", busy_seconds)
    out = {"trace_out": tmp_path / "trace.json", "plan_out": tmp_path / "plan.json"}
    options = {"memory_budget": budget, "storage": tmp_path, "profile_iterations": 1, "recompute": "off", **out}
    with caplog.at_level(logging.INFO, logger="teraio"):
        result = train(TRAINED, options=options)
    check(result, reference, budget)
    progress = [status for (status,) in result.progress]
    phases = [status.phase for status in progress]
    first = phases.index("planned")
    assert set(phases[first:]) == {"planned"}
    assert (progress[first].replans, progress[-1].replans) == (0, 1)
    read = [status.moved_bytes["storage->device"] for status in progress]
    assert read[-1] - read[-2] < read[first + 2] - read[first + 1]
    told = [record.message for record in caplog.records]
    assert any("planned again" in message for message in told) and any("the new one is followed" in m for m in told)
    trace, made = Trace.load(out["trace_out"]), Plan.load(out["plan_out"])
    link = trace.hardware.link("storage", "device")
    assert link is not None and link.bytes_per_second == pytest.approx(SLOW_READ, rel=0.01)
    assert made.trace_fingerprint == trace.fingerprint and made.policy == "ilp" and made.predicted is not None
    assert made.predicted.iteration_seconds == progress[-1].predicted_iteration_seconds
