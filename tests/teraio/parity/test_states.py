"""Optimizers and what users do around their steps, where states do not fit in: the bits of the unmanaged optimizer."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.testing._internal.two_tensor import TwoTensor

import teraio

from ...thoroughness import by_profile
from ...training import begin
from .harness import MIB, Case, Result, Run, check_exact, check_states, one_update, share_of_peak, train
from .loops import by_hand, closure_of, generate, infer, no_optimizers, rollout, told, with_closure
from .optimizers import KEEPS_NONE, KINDS, small

pytestmark = pytest.mark.usefixtures("fine_and_quick", "few_slices")

STEPS = 12
TOGETHER = 6
"""Optimizers in one training, one for each layer: compiling takes longer than training."""


def in_turns(run: Run, x: Tensor, index: int) -> None:
    """Another optimizer steps last each time: what was used last stays on the device."""
    run.backward(x)
    first = index % len(run.optimizers)
    for optimizer in run.optimizers[first:] + run.optimizers[:first]:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("first", range(0, len(KINDS), TOGETHER))
def test_every_optimizer(first: int, tmp_path: Path) -> None:
    kinds = list(KINDS)[first : first + TOGETHER]

    def make(module: Any) -> list[Optimizer]:
        layers = [[*up.parameters(), *down.parameters()] for up, down in zip(module.up, module.down, strict=True)]
        layers[0].append(module.unused)
        return [KINDS[kind](layer) for kind, layer in zip(kinds, layers, strict=True)]

    case = small(make, step=in_turns, steps=by_profile(ci=9, long=50), layers=len(kinds))
    result = check_states(case, tmp_path, states=len(kinds), fraction=0.33)
    for layer, kind in enumerate(kinds):
        assert kind in KEEPS_NONE or any(f".{layer}." in name for name in result.moved_states), result.moved_states


# -- what users do


class Doubled(Optimizer):
    """Momentum as a tensor without memory of its own, over two that have it, as in optimizers of 8 bits."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                both = self.state[parameter].setdefault("momentum", TwoTensor(*(torch.zeros_like(parameter) for _ in range(2))))
                for each in (both.a, both.b):
                    each.mul_(0.9).add_(parameter.grad)
                parameter.sub_(both.a, alpha=0.01)


def groups(module: nn.Module) -> list[Optimizer]:
    """Two groups of different settings, and another optimizer for a part of the parameters."""
    first, second, *others = [p for p in module.parameters() if p.requires_grad]
    grouped = [{"params": [first], "lr": 1e-2}, {"params": others, "weight_decay": 0.1}]
    return [torch.optim.AdamW(grouped), torch.optim.SGD([second], lr=0.1, momentum=0.9)]


def scheduled(run: Run, x: Tensor, index: int) -> None:
    """Clipped by norm or value, with a scheduler; gradients are zeroed in both ways."""
    if index == 0:
        run.kept["scheduler"] = torch.optim.lr_scheduler.StepLR(run.optimizer, 3, gamma=0.5)
    for half in x.chunk(2):  # two passes to an update
        run.backward(half, 0.5)
    if index % 2:
        run.record("norm", nn.utils.clip_grad_norm_(run.module.parameters(), 0.05))
    else:
        nn.utils.clip_grad_value_(run.module.parameters(), 1e-4)
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=index < STEPS // 2)
    run.kept["scheduler"].step()


def changing(run: Run, x: Tensor, index: int) -> None:
    """With a gradient scaler; one step overflows and is left out. A parameter group comes later, with gradients before.

    In the end a step hook comes: the optimizer runs whole, does not fit, and reaches its states where they are.
    """
    if index == 6:
        run.optimizer.add_param_group({"params": list(run.module.down.parameters()), "lr": 1e-2})
    if index == 11:
        run.optimizer.register_step_pre_hook(lambda *_: None)
    scaler = run.kept.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4))
    scaler.scale(run.loss(x)).backward()
    if index == 5:
        run.module.up[0].weight.grad[0, 0] = torch.inf
    scaler.step(run.optimizer)
    run.module.zero_grad()
    scaler.update()
    run.record("scale", torch.tensor(scaler.get_scale()))


def touching_and_going_back(run: Run, x: Tensor, index: int) -> None:
    """User code reads, writes and replaces states between the steps, and loads what was saved before."""
    one_update(run, x, index)
    state = run.optimizer.state[run.module.down[0].weight]
    run.record("mean", state["exp_avg"][3])
    state["exp_avg_sq"].mul_(1.5)
    if index == 2:
        run.kept["file"] = io.BytesIO()
        torch.save((run.module.state_dict(), run.optimizer.state_dict()), run.kept["file"])
    if index == 7:
        state["exp_avg"] = state["exp_avg"].clone() * 2
    if index == 9:
        run.kept["file"].seek(0)
        model, optimizer = torch.load(run.kept["file"])
        run.module.load_state_dict(model)
        run.optimizer.load_state_dict(optimizer)


def lbfgs(module: nn.Module) -> Optimizer:
    """It gets the closure itself, calls it several times, and runs as without teraio."""
    return torch.optim.LBFGS(module.parameters(), max_iter=2, history_size=2)


# -- all of them


def followed(result: Result) -> bool:
    return result.status.waiting_for is None and sum(result.status.moved_bytes.values()) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """states, fraction, options: see `check_states`. check: of the budgeted run."""

    case: Case
    states: int = 6
    fraction: float = 0.45
    options: dict[str, Any] = field(default_factory=dict)
    check: Callable[[Result], bool] = field(default=lambda result: True)


def own(step: Any, steps: int, make: Any = no_optimizers, *, layers: int = 3, deviations: int | None = None) -> Row:
    return Row(
        case=small(make, step=step, steps=steps, layers=layers, planned=True),
        states=0,
        fraction=0.6,
        check=lambda result: followed(result) and deviations in (None, result.status.deviations),
    )


ROWS = {
    "thirty percent of the peak": Row(
        case=small("AdamW", layers=4, planned=True, steps=8),
        states=13,
        fraction=0.3,
        options={"debug": True},
        check=lambda result: result.status.deviations <= 1,
    ),
    "a host tier": Row(
        case=small("AdamW", planned=True, steps=8),
        options={"host_budget": 6 * MIB, "host_updates": False, "checksums": True},
        check=lambda result: min(result.status.moved_bytes[f"device->{tier}"] for tier in ("host", "storage")) > 0,
    ),
    "states over several tensors": Row(  # the second one is a block of its own
        case=small(lambda module: Doubled(module.parameters()), planned=True, steps=8),
        states=4,
        check=lambda result: "1" in {name.rsplit(".", 1)[-1] for name in result.moved_states},
    ),
    "groups, a scheduler, clipping and accumulation": Row(case=small(groups, step=scheduled), states=5),
    "a scaler, parameters that are added later and a hook": Row(
        case=small(lambda module: torch.optim.AdamW(module.up.parameters()), step=changing, steps=15),  # type: ignore[operator, union-attr]
        fraction=0.5,
    ),
    "user code touches states and loads them": Row(case=small("AdamW", step=touching_and_going_back, planned=True)),
    "a closure": Row(case=small("AdamW", step=with_closure, planned=True, steps=10)),
    "a closure whose updates are in the backward pass": Row(
        case=small("AdamW", step=with_closure, planned=True, steps=16),
        states=1,
        options={"overlap_step": True},
        check=lambda result: min(result.left_over[:3]) > 0 and set(result.left_over[3:]) == {0},
    ),
    "LBFGS": Row(
        case=small(lbfgs, step=lambda run, x, index: run.optimizer.step(closure_of(run, x)), steps=3),
        states=0,
        fraction=4.0,
        check=lambda result: len(result.left) > 3,
    ),
    "updates by hand": own(by_hand, 14, deviations=0),
    "updates by hand that teraio is told of": own(told, 7, deviations=0),
    "several updates after passes without gradients": own(rollout, 12, "Adam", layers=2),
    "many passes without gradients": own(generate, 8, "Adam", layers=2),
    "no updates": own(infer, 42),
}


@pytest.mark.parametrize("name", ROWS)
def test_what_users_do(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    result = check_states(row.case, tmp_path, states=row.states, fraction=row.fraction, **row.options)
    assert row.check(result), result.status


# -- the rest


def test_checkpoints_in_both_directions(tmp_path: Path) -> None:
    """Managed to plain, plain to managed, without any call of teraio's; each ends where a straight training does."""
    file, half = tmp_path / "checkpoint.pt", STEPS // 2

    def saving(run: Run, x: Tensor, index: int) -> None:
        one_update(run, x, index)
        if index == half - 1:
            torch.save((run.module.state_dict(), run.optimizer.state_dict()), file)

    def resuming(run: Run, x: Tensor, index: int) -> None:
        """Begins where `saving` saved, with new objects."""
        if index == half:
            model, optimizer = torch.load(file)
            run.module.load_state_dict(model)
            run.optimizer.load_state_dict(optimizer)
        one_update(run, x, index) if index >= half else None

    first, second = small("AdamW", step=saving), small("AdamW", step=resuming)
    straight = train(first, backend=None)
    managed = share_of_peak(small("AdamW"), tmp_path, 0.45)
    check_exact(resumed := train(second, options=managed), second_half(straight, half))
    check_exact(saved := train(first, options=managed), straight)
    check_exact(train(second, backend=None), second_half(straight, half))
    assert resumed.moved_states and saved.moved_states


def second_half(result: Result, half: int) -> Result:
    return Result(result.losses[half:], (), (), result.parameters, (), states=result.states)


def test_which_optimizers_are_managed(tmp_path: Path) -> None:
    """With the option off, those that are given by hand; parameters, gradients and activations move all the same."""

    def given(module: nn.Module) -> Optimizer:
        optimizer = torch.optim.AdamW(module.parameters())
        teraio.manage_optimizer(optimizer)
        return optimizer

    expected = train(small("AdamW", steps=6), backend=None)
    for make, fraction in (("AdamW", 0.8), (given, 0.45)):
        options = share_of_peak(small("AdamW", steps=6), tmp_path, fraction) | {"optimizer": "off"}
        found = train(small(make, steps=6), options=options)  # type: ignore[arg-type]
        check_exact(found, expected)
        assert len(found.moved_states) >= 6 if make is given else not found.moved_states
        assert found.status.moved_bytes["device->storage"] > 0
    with pytest.raises(teraio.UnsupportedError, match="found dict, wanted a torch.optim.Optimizer"):
        teraio.manage_optimizer({})  # type: ignore[arg-type]


def test_no_room_for_states_on_the_drives(tmp_path: Path) -> None:
    """Refused before the first update changes a parameter."""
    changed: list[bool] = []

    def step(run: Run, x: Tensor, index: int) -> None:
        before = [p.detach().clone() for p in run.module.parameters()]
        run.backward(x)
        try:
            run.optimizer.step()
        finally:
            changed.append(not all(map(torch.equal, before, run.module.parameters())))

    options = {"memory_budget": 16 * MIB, "storage": str(tmp_path), "storage_budget": 14 * MIB, "profile_iterations": 1000}
    with pytest.raises(teraio.StorageFullError, match="storage_budget"):
        train(small("AdamW", layers=6, steps=1, step=step), options=options)
    assert changed == [False]


def test_status_tells_what_a_run_waits_for(tmp_path: Path) -> None:
    """Gradients that pile up may be those of one update: teraio waits for its end."""
    training = begin(lambda: nn.Linear(1024, 1024), no_optimizers, {"memory_budget": 64 << 20, "storage": str(tmp_path)})
    for _ in range(6):
        training.model(torch.ones(2, 1024)).sum().backward()
    (status,) = teraio.status()
    assert status.phase == "profile" and status.iterations == 0
    assert status.waiting_for == (
        "the end of an iteration: the step of a torch.optim optimizer over parameters of the compiled model, or "
        "teraio.step_done() after your own update (5 passes so far)"
    )
    assert status.movable_bytes >= 8 << 20 and 0 < status.immovable_bytes < 1 << 20
    teraio.step_done()
    (status,) = teraio.status()
    assert status.iterations == 1 and status.waiting_for is not None
    assert status.waiting_for.startswith("4 iterations in a row that run the same graphs (0 so far); the last ones did not count")
