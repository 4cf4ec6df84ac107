"""Trainings that a benchmark's runner really runs, each in a process of its own."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import alone
from benchmarks.alone import Run, Runner
from benchmarks.gpu_budgets import budget_figures
from benchmarks.gpu_optimizer import followed
from examples.llama import SIZES

from .test_gpu_parts import by_name, tiny_scale

BUDGET = 42 << 20


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("storage"))
    return {"memory_budget": BUDGET, "storage": folder, "codegen": "eager", "profile_iterations": 1}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Of trainings of one layer, as short as can be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alone, "COUNTED_SECONDS", 0.0)
        patch.setattr(alone, "GROUP_SECONDS", 0.0)
        patch.setattr(alone, "SIZES", {"tiny": replace(SIZES["tiny"], layers=1)})
        yield Runner(tiny_scale(tmp_path_factory.mktemp("runner")))


@pytest.fixture(scope="module")
def first(runner: Runner, options: dict[str, Any]) -> Run:
    """A training under a budget, without a plan."""
    outcome = runner.run("a budget", runner.scale.setting("tiny", options=options))
    assert isinstance(outcome, Run), outcome.reason
    return outcome


def test_a_training_under_a_budget_gives_its_trace_and_what_it_moved(first: Run) -> None:
    assert len(first.steps) == 2 and first.steps[0].tokens == 16
    assert first.trace is not None and len(first.trace.hardware.links) == 2
    assert first.peak_bytes > 20 << 20 and first.busy_seconds is not None
    assert first.moved_bytes["storage->device"] > 1 << 20
    assert first.phase in ("planning", "planned")
    figures = by_name(budget_figures("x", first, BUDGET, first))
    assert figures["x: use of storage->device"].value is not None


@pytest.mark.long
def test_a_plan_made_offline_is_followed_by_a_training(runner: Runner, first: Run, options: dict[str, Any]) -> None:
    assert first.trace is not None
    outcome = followed(runner, "tiny", "zero-infinity", first.trace, options)
    assert isinstance(outcome, Run), outcome.reason
    assert outcome.phase == "planned" and outcome.plan is not None and outcome.plan.policy == "zero-infinity"
    assert [step.loss for step in outcome.steps] == pytest.approx([step.loss for step in first.steps], rel=1e-4)
