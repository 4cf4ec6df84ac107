"""Updates inside the backward pass, under budgets: the same bits as PyTorch's order, with fewer gradients at once."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
import teraio
from runtime.execution import StageRun
from teraio.following import IterationObserver

from ...thoroughness import every_other
from ...training import blocks
from .harness import (
    MIB,
    Case,
    Result,
    Run,
    budgeted_options,
    check_exact,
    check_states,
    compiled_input_needs_grad,
    one_update,
    share_of_peak,
    train,
    unmanaged,
)
from .models import HIDDEN, WIDTH
from .optimizers import small
from .test_states import groups

pytestmark = [pytest.mark.usefixtures("fine_and_quick"), compiled_input_needs_grad]

STEPS = 16
WATCHED = 3
"""Steps until parameters are updated inside the backward pass: the optimizer's first one, and two more."""


class Net(nn.Module):
    """Residual layers of two weights of 1 MiB each: features [rows, 64] to [rows, 64].

    tied: all have the first one's `up`. frozen: the last one learns nothing. broken: a graph break after the first one.
    """

    def __init__(self, layers: int, *, tied: bool = False, frozen: bool = False, broken: bool = False) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, HIDDEN) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(HIDDEN, WIDTH) for _ in range(layers))
        self.broken = broken
        for up in self.up:
            if tied:
                up.weight = self.up[0].weight  # type: ignore[assignment]
        if frozen:
            self.up[-1].requires_grad_(False)
            self.down[-1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        first = 1 if self.broken else 0
        x = self._run(x, 0, first)
        if self.broken:
            torch._dynamo.graph_break()
        return self._run(x, first, len(self.up))

    def _run(self, x: Tensor, begin: int, end: int) -> Tensor:
        for layer in range(begin, end):
            x = x + self.down[layer](torch.tanh(self.up[layer](x)))
        return x


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
    return small(make_optimizer, layers=layers, planned=planned, step=step, steps=steps, model=functools.partial(Net, **variant))


def grouped(variant: str, planned: bool) -> Case:
    return net(groups, 3, planned, step=scheduled, **{variant: True})


ROWS: dict[str, tuple[Case, float, int]] = {
    "AdamW by a plan": (net("AdamW", 4, True), 0.3, 0),
    "AdamW": (net("AdamW", 4, False), 0.3, 0),
    "momentum": (net("SGD momentum", 4, False), 0.3, 0),
    "momentum by a plan": (net("SGD momentum", 4, True), 0.3, 0),
    "groups and schedulers, tied weights, by a plan": (grouped("tied", True), 0.45, 0),
    "groups and schedulers, tied weights": (grouped("tied", False), 0.45, 0),
    "groups and schedulers, frozen weights": (grouped("frozen", False), 0.45, 0),
    "groups and schedulers, frozen weights, by a plan": (grouped("frozen", True), 0.45, 0),
    "groups and schedulers, two graphs, by a plan": (grouped("broken", True), 0.45, 0),
    "groups and schedulers, two graphs": (grouped("broken", False), 0.45, 0),
    # Two graphs contribute to one gradient, which the step consumes; all others are consumed inside.
    "weights that are tied across two graphs": (net("AdamW", 2, False, steps=12, tied=True, broken=True), 0.5, 1),
}
"""Cases, fractions of the peak, and how many gradients are left."""


@pytest.mark.parametrize("name", every_other(*ROWS))
def test_the_same_bits(name: str, tmp_path: Path) -> None:
    case, fraction, left = ROWS[name]
    result = check_states(case, tmp_path, states=1, fraction=fraction, overlap_step=True)
    assert overlapped(result, left=left)
    assert result.status.deviations <= 1


@pytest.mark.long
def test_the_smallest_budgets(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The one that the errors name is no larger with the option: where there is no room for a whole update, the step does it,
    by slices. With what the log asks for, all are updated inside; on demand and by a plan.
    """
    case = small("AdamW", steps=10)
    expected = unmanaged(case)
    budget = smallest(case, tmp_path)
    budgets = [budget]
    while True:
        caplog.clear()
        options = budgeted_options(case, tmp_path, budget=budgets[-1]) | {"overlap_step": True}
        found = train(case, options=options)
        check_exact(found, expected)
        assert found.status.device_peak_bytes <= budgets[-1]
        asked = re.findall(r"memory_budget of at least (\d+)", caplog.text)
        if not asked:
            break
        assert len(asked) == 1 and found.left_over[-1] < found.left_over[0]
        budgets.append(int(asked[0]))
    assert 2 <= len(budgets) and budget < budgets[-1] < 6.5 * MIB, "a parameter's update takes 6, with temporaries"
    planned = train(replace(case, planned=True), options=options | {"profile_iterations": 2, "solver_time_limit": 5})
    check_exact(planned, expected)
    assert planned.status.phase == "planned"
    for result in (found, planned):  # in the first pass it turned out that updates have to be cut finer
        assert result.left_over[WATCHED] > 0 and set(result.left_over[WATCHED + 1 :]) == {0}


def test_with_a_host_tier(tmp_path: Path) -> None:
    """Where the plan might run updates on the host: those inside the backward pass stay on the device, and keep the bits."""
    case = small("AdamW", layers=3, planned=True, steps=14)
    trace_out = tmp_path / "trace.json"
    options: dict[str, Any] = {"host_budget": 64 * MIB, "overlap_step": True, "trace_out": trace_out}
    assert overlapped(check_states(case, tmp_path, states=1, fraction=0.4, **options))
    trace = planner.Trace.load(trace_out)
    assert trace.subgroups and all(subgroup.host_seconds is None for subgroup in trace.subgroups)


def kept_once(run: Run, x: Tensor, index: int) -> None:
    """One pass keeps its graph, when a plan is followed."""
    run.backward(x, retain_graph=index == 14)
    run.update()


def test_one_pass_in_the_ordinary_order_deviates_from_the_plan(tmp_path: Path) -> None:
    result = check_states(net("AdamW", 3, True, step=kept_once, steps=18), tmp_path, states=1, overlap_step=True)
    assert set(result.left_over[WATCHED:14]) == set(result.left_over[15:]) == {0} and result.left_over[14] == 12
    assert result.status.deviations == 2, "the backward graph, and the step"


def smallest(case: Case, folder: Path) -> int:
    """The budget that the errors name in the end, without the option."""
    budget = MIB
    while True:
        try:
            train(replace(case, steps=2), options=budgeted_options(case, folder, budget=budget))
        except teraio.BudgetError as error:
            assert error.smallest_bytes > budget
            budget = error.smallest_bytes
        else:
            return budget


def test_compiled_by_inductor(tmp_path: Path) -> None:
    case = replace(small("AdamW", planned=True, steps=10), options={"codegen": "inductor"})
    assert overlapped(check_states(case, tmp_path, states=1, codegen="inductor", overlap_step=True))


# -- what it is for


@pytest.fixture
def gradient_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of all gradients that exist, after each stage."""
    found: list[int] = []
    stage_ended = IterationObserver.stage_ended

    def noting(self: IterationObserver, run: StageRun) -> None:
        stage_ended(self, run)
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


def test_a_trace_and_what_it_takes_to_move_nothing(tmp_path: Path) -> None:
    """A budget of two thirds of the ordinary peak: with the option the plan moves next to nothing."""
    case = net("SGD", 6, True, steps=14)
    options = share_of_peak(case, tmp_path, 0.66) | {"replan": False}
    predicted, peaks = [], []
    for overlap in (False, True):
        files = {name: tmp_path / f"{name}{overlap}.json" for name in ("trace_out", "plan_out")}
        train(case, options=options | files | {"overlap_step": overlap})
        trace, plan = planner.Trace.load(files["trace_out"]), planner.Plan.load(files["plan_out"])
        assert plan.predicted is not None
        predicted.append(sum(plan.predicted.moved_bytes.values()))
        peaks.append(peak(trace))
    inside = [s for s in trace.stages if s.phase == "optimizer" and s.name.startswith("backward/update.")]
    assert {subgroup.stage for subgroup in trace.subgroups} == {stage.id for stage in inside}
    assert sum(subgroup.elements for subgroup in trace.subgroups) == 6 * (2 * WIDTH * HIDDEN + WIDTH + HIDDEN)
    assert peaks[1] < 0.65 * peaks[0]
    assert predicted[0] > 4 * MIB and predicted[1] < predicted[0] / 4


def peak(trace: planner.Trace) -> int:
    """Bytes of all blocks that exist at once, at the most."""
    stages = range(len(trace.stages))
    return max(sum(b.size_bytes for b in trace.blocks if b.persistent or b.uses[0] <= s <= b.uses[-1]) for s in stages)
