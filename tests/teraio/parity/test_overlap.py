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
from torch.optim import Optimizer

import planner
import teraio
from runtime.execution import StageRun
from teraio.following import IterationObserver

from ...thoroughness import every_other
from ...training import blocks
from .harness import compiled_input_needs_grad
from .optimizers import HIDDEN, KINDS, MIB, WIDTH, Case, Result, Run, budgeted, check, one, plain, train, unmanaged

pytestmark = pytest.mark.usefixtures("fine_and_quick")

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
    return min(result.gradients[:WATCHED]) > left and set(result.gradients[WATCHED:]) == {left}


@pytest.mark.parametrize(
    ("kind", "planned"), every_other(("AdamW", True), ("SGD momentum", True), ("SGD momentum", False), ("AdamW", False))
)
def test_thirty_percent_of_the_peak(kind: str, planned: bool, tmp_path: Path) -> None:
    case = Case(make=one(KINDS[kind]), layers=4, planned=planned, steps=STEPS)
    result = check(case, tmp_path, states=1, fraction=0.3, overlap_step=True)
    assert overlapped(result)
    assert result.status.deviations <= 1


def groups(module: nn.Module) -> list[Optimizer]:
    """Two groups of different settings, and another optimizer for a part of the parameters."""
    first, second, *others = [p for p in module.parameters() if p.requires_grad]
    grouped = [{"params": [first], "lr": 1e-2}, {"params": others, "weight_decay": 0.1}]
    return [torch.optim.AdamW(grouped), torch.optim.SGD([second], lr=0.1, momentum=0.9)]


def scheduled(run: Run, x: Tensor, index: int) -> None:
    """Every optimizer has a scheduler, which steps after it."""
    if index == 0:
        run.kept["schedulers"] = [torch.optim.lr_scheduler.StepLR(o, 3, gamma=0.5) for o in run.optimizers]
    plain(run, x, index)
    for scheduler in run.kept["schedulers"]:
        scheduler.step()


@pytest.mark.parametrize(
    ("variant", "planned"),
    every_other(("tied", True), ("tied", False), ("frozen", False), ("frozen", True), ("broken", True), ("broken", False)),
)
@compiled_input_needs_grad
def test_groups_and_schedulers(variant: str, planned: bool, tmp_path: Path) -> None:
    """With tied weights, frozen ones, and two graphs."""
    make_model = functools.partial(Net, **{variant: True})
    case = Case(make=groups, step=scheduled, layers=3, planned=planned, steps=STEPS, make_model=make_model)
    assert overlapped(check(case, tmp_path, states=1, fraction=0.45, overlap_step=True))


@compiled_input_needs_grad
def test_weights_that_are_tied_across_a_graph_break(tmp_path: Path) -> None:
    """Two graphs contribute to one gradient, which the step consumes; all others are consumed inside."""
    make_model = functools.partial(Net, tied=True, broken=True)
    case = Case(make=one(torch.optim.AdamW), layers=2, steps=12, make_model=make_model)
    assert overlapped(check(case, tmp_path, states=1, fraction=0.5, overlap_step=True), left=1)


@pytest.mark.long
def test_the_smallest_budgets(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The one that the errors name is no larger with the option: where there is no room for a whole update, the step does it,
    by slices. With what the log asks for, all are updated inside; on demand and by a plan.
    """
    case = Case(make=one(torch.optim.AdamW), steps=10)
    expected = unmanaged(case, tmp_path)
    budget = smallest(case, tmp_path)
    budgets = [budget]
    while True:
        caplog.clear()
        options = budgeted(case, tmp_path, budgets[-1]) | {"overlap_step": True}
        found = train(case, tmp_path, options)
        assert found.status.device_peak_bytes <= budgets[-1] and all(map(torch.equal, found.values, expected.values))
        asked = re.findall(r"memory_budget of at least (\d+)", caplog.text)
        if not asked:
            break
        assert len(asked) == 1 and found.gradients[-1] < found.gradients[0]
        budgets.append(int(asked[0]))
    assert 2 <= len(budgets) and budget < budgets[-1] < 6.5 * MIB, "a parameter's update takes 6, with temporaries"
    planned = train(replace(case, planned=True), tmp_path, options | {"profile_iterations": 2, "solver_time_limit": 5})
    assert planned.status.phase == "planned" and all(map(torch.equal, planned.values, expected.values))
    for result in (found, planned):  # in the first pass it turned out that updates have to be cut finer
        assert result.gradients[WATCHED] > 0 and set(result.gradients[WATCHED + 1 :]) == {0}


def test_with_a_host_tier(tmp_path: Path) -> None:
    """Where the plan might run updates on the host: those inside the backward pass stay on the device, and keep the bits."""
    case = Case(make=one(torch.optim.AdamW), layers=3, planned=True, steps=14)
    trace_out = tmp_path / "trace.json"
    options: dict[str, Any] = {"host_budget": 64 * MIB, "overlap_step": True, "trace_out": trace_out}
    assert overlapped(check(case, tmp_path, states=1, fraction=0.4, **options))
    trace = planner.Trace.load(trace_out)
    assert trace.subgroups and all(subgroup.host_seconds is None for subgroup in trace.subgroups)


def kept_once(run: Run, x: Tensor, index: int) -> None:
    """One pass keeps its graph, when a plan is followed."""
    if index != 14:
        return plain(run, x, index)
    loss = (run.model(x) - x.flip(0)).square().mean()
    loss.backward(retain_graph=True)
    run.values.append(loss.detach().clone())
    run.gradients.append(sum(p.grad is not None for p in run.module.parameters()))
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad()


def test_one_pass_in_the_ordinary_order_deviates_from_the_plan(tmp_path: Path) -> None:
    case = Case(make=one(torch.optim.AdamW), step=kept_once, layers=3, planned=True, steps=18)
    result = check(case, tmp_path, states=1, overlap_step=True)
    assert set(result.gradients[WATCHED:14]) == set(result.gradients[15:]) == {0} and result.gradients[14] == 12
    assert result.status.deviations == 2, "the backward graph, and the step"


def smallest(case: Case, folder: Path) -> int:
    """The budget that the errors name in the end, without the option."""
    budget = MIB
    while True:
        try:
            train(replace(case, steps=2), folder, budgeted(case, folder, budget))
        except teraio.BudgetError as error:
            assert error.smallest_bytes > budget
            budget = error.smallest_bytes
        else:
            return budget


def test_compiled_by_inductor(tmp_path: Path) -> None:
    case = Case(make=one(torch.optim.AdamW), layers=2, planned=True, steps=10)
    expected = train(case, tmp_path, {"optimizer": "off", "codegen": "inductor"})
    budget = int(0.45 * expected.status.device_peak_bytes)
    options = budgeted(case, tmp_path, budget) | {"solver_time_limit": 2}
    found = train(case, tmp_path, options | {"codegen": "inductor", "overlap_step": True})
    assert all(map(torch.equal, found.values, expected.values)) and overlapped(found)
    assert found.status.phase == "planned" and found.status.device_peak_bytes <= budget


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
    case = Case(make=one(KINDS["SGD"]), layers=6, steps=8)
    train(case, tmp_path, {"profile_iterations": 1000})
    ordinary = max(gradient_bytes)
    gradient_bytes.clear()
    result = train(case, tmp_path, {"profile_iterations": 1000, "overlap_step": True})
    stages = len(gradient_bytes) // case.steps
    assert overlapped(result)
    assert ordinary > 12 * MIB
    assert 0 < max(gradient_bytes[-4 * stages :]) < 3.5 * MIB


def test_a_trace_and_what_it_takes_to_move_nothing(tmp_path: Path) -> None:
    """A budget of two thirds of the ordinary peak: with the option the plan moves next to nothing."""
    case = Case(make=one(KINDS["SGD"]), layers=6, planned=True, steps=14)
    budget = int(0.66 * unmanaged(case, tmp_path).status.device_peak_bytes)
    options = budgeted(case, tmp_path, budget) | {"replan": False}
    predicted, peaks = [], []
    for overlap in (False, True):
        files = {name: tmp_path / f"{name}{overlap}.json" for name in ("trace_out", "plan_out")}
        train(case, tmp_path, options | files | {"overlap_step": overlap})
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
