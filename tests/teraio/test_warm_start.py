"""A second start of the same training follows the plan of the first: nothing is profiled or solved, and no bit changes."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from teraio.registry import REGISTRY

from ..training import MIB, Training, begin, mean_square_step, random_rows, unequal
from .instant_jobs import InstantJob

STEPS = 4


class Solver:
    """Counts plans that are made, quickly."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, trace: planner.Trace, budgets: planner.Budgets, *, time_limit_seconds: float) -> InstantJob:
        self.count += 1
        return InstantJob(trace, planner.plan(trace, budgets, policy="belady", lower_bound=False))


def start(options: dict[str, Any] | None) -> tuple[list[str], list[Tensor], Training]:
    """Train from the beginning. Returns the phase after each step, and the weights at the end."""
    training = begin(
        lambda: nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)]),
        lambda module: [torch.optim.AdamW(module.parameters(), lr=0.01)],
        options,
    )
    torch.manual_seed(1)
    training.run(random_rows(STEPS), lambda batch, index: mean_square_step(training, batch), planned=True)
    phases = [status.phase for (status,) in training.progress] if options is not None else []
    return phases, list(training.finish().values()), training


def test_a_second_start_follows_its_plan_from_the_second_iteration_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_links: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Its optimizer makes its states in the first one. A plan that fits no more is made again."""
    solver, folder = Solver(), tmp_path / "cache" / "teraio" / "plans"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(REGISTRY, "parts", dataclasses.replace(REGISTRY.parts, start_job=solver))
    options = {"memory_budget": 10 * MIB, "storage": tmp_path, "profile_iterations": 1, "replan": False}
    options |= {"plan_cache": "read-write"}
    wanted = start(None)[1]

    phases, cold, _ = start(options)
    assert phases == ["profile", "profile", "planning", "planned"] and solver.count == 1 and len(list(folder.iterdir())) == 1

    caplog.clear()  # the training without teraio may have been told that it is not managed
    with caplog.at_level(logging.INFO, logger="teraio"):
        phases, warm, training = start({**options, "trace_out": tmp_path / "trace.json", "plan_out": tmp_path / "plan.json"})
    assert phases == ["planned"] * STEPS and solver.count == 1
    assert not unequal(cold, wanted) and not unequal(warm, wanted)
    (status,) = training.progress[-1]
    assert status.deviations == 0 and status.floor_bytes and status.moved_bytes["device->storage"] > 0
    assert planner.Plan.load(tmp_path / "plan.json").trace_fingerprint == planner.Trace.load(tmp_path / "trace.json").fingerprint
    messages = [record.getMessage() for record in caplog.records if record.name == "teraio"]
    assert messages[0] == "the plan of an earlier start fits: nothing is profiled and nothing is solved"
    assert not any(message.startswith("optimizers are updated in subgroups") for message in messages), "the plan has their size"

    assert start({**options, "memory_budget": 11 * MIB})[0][0] == "profile" and solver.count == 2
    assert len(list(folder.iterdir())) == 2
