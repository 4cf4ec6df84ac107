"""Updates inside the backward pass, under budgets: the same bits as PyTorch's order, with fewer gradients at once."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import planner
from teraio.following import IterationObserver

from ...training import blocks
from .harness import MIB, Case, Result, Run, check_states, compiled_input_needs_grad, one_update, train
from .optimizers import Layers, small
from .test_states import groups

pytestmark = [pytest.mark.usefixtures("fine_and_quick", "few_slices"), compiled_input_needs_grad]

STEPS = 9
WATCHED = 3
"""Steps until parameters are updated inside the backward pass: the optimizer's first one, and two more."""


def overlapped(result: Result, *, left: int = 0) -> bool:
    """Whether all but `left` gradients were gone after each backward pass but the first ones."""
    return min(result.left_over[:WATCHED]) > left and set(result.left_over[WATCHED:]) == {left}


def scheduled(run: Run, x: Tensor, index: int) -> None:
    """Every optimizer has a scheduler, which steps after it."""
    if index == 0:
        run.kept["schedulers"] = [torch.optim.lr_scheduler.StepLR(o, 3, gamma=0.5) for o in run.optimizers]
    one_update(run, x, index)
    for scheduler in run.kept["schedulers"]:
        scheduler.step()


def net(make_optimizer: Any, layers: int, planned: bool, *, step: Any = one_update, steps: int = STEPS, **variant: bool) -> Case:
    return small(
        make_optimizer, layers=layers, planned=planned, step=step, steps=steps, model=functools.partial(Layers, **variant)
    )


def grouped(variant: str, planned: bool) -> Case:
    return net(groups, 3, planned, step=scheduled, **{variant: True})


ROWS: dict[str, tuple[Case, float, int]] = {
    "momentum": (net("SGD momentum", 4, False), 0.3, 0),
    "groups and schedulers, tied weights, by a plan": (grouped("tied", True), 0.45, 0),
    "groups and schedulers, frozen weights": (grouped("frozen", False), 0.45, 0),
    "groups and schedulers, two graphs, by a plan": (grouped("broken", True), 0.45, 0),
    # Two graphs contribute to one gradient, which the step consumes; all others are consumed inside.
    "weights that are tied across two graphs": (net("AdamW", 2, False, steps=12, tied=True, broken=True), 0.5, 1),
}
"""Cases, fractions of the peak, and how many gradients are left."""


@pytest.mark.parametrize("name", ROWS)
def test_the_same_bits(name: str, tmp_path: Path) -> None:
    case, fraction, left = ROWS[name]
    result = check_states(case, tmp_path, states=1, fraction=fraction, overlap_step=True)
    assert overlapped(result, left=left)
    assert result.status.deviations <= 1


def test_with_a_host_tier(tmp_path: Path) -> None:
    """Where the plan might run updates on the host: those inside the backward pass stay on the device, and keep the bits."""
    case = small("AdamW", layers=3, planned=True, steps=10)
    trace_out = tmp_path / "trace.json"
    options: dict[str, Any] = {"host_budget": 64 * MIB, "overlap_step": True, "trace_out": trace_out}
    assert overlapped(check_states(case, tmp_path, states=1, fraction=0.4, **options))
    trace = planner.Trace.load(trace_out)
    assert trace.subgroups and all(subgroup.host_seconds is None for subgroup in trace.subgroups)
    assert all(trace.stages[subgroup.stage].name.startswith("backward/update.") for subgroup in trace.subgroups)


def test_compiled_by_inductor(tmp_path: Path) -> None:
    case = replace(small("AdamW", planned=True, steps=10), options={"codegen": "inductor"})
    assert overlapped(check_states(case, tmp_path, states=1, codegen="inductor", overlap_step=True))


# -- what it is for


@pytest.fixture
def gradient_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of all gradients that exist, after each stage."""
    found: list[int] = []
    stage_ended = IterationObserver.stage_ended

    def noting(self: IterationObserver, *run: Any) -> None:
        stage_ended(self, *run)
        found.append(sum(block.size_bytes for block in blocks() if block.kind == "gradient"))

    monkeypatch.setattr(IterationObserver, "stage_ended", noting)
    return found


def test_fewer_gradients_at_once(gradient_bytes: list[int], tmp_path: Path) -> None:
    """Six layers of 2 MiB: the ordinary order needs room for all gradients, this one for those of a layer."""
    case = small("SGD", layers=6, steps=8)
    train(case, options={"profile_iterations": 1000})
    ordinary = max(gradient_bytes)
    gradient_bytes.clear()
    result = train(case, options={"profile_iterations": 1000, "overlap_step": True})
    stages = len(gradient_bytes) // (case.steps or 0)
    assert overlapped(result)
    assert ordinary > 12 * MIB
    assert 0 < max(gradient_bytes[-4 * stages :]) < 3.5 * MIB
