"""Every optimizer, and what user code does around its steps, in every way to manage it: the same bits as plain PyTorch.

Over masters: the same as the textbook loop, which steps over fp32 clones of the parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from teraio.optimizer import SubgroupSizes, arithmetic

from .managed_training import ManagedTraining, check_sliced
from .plain_training import (
    HALF,
    MASTER_OPTIMIZERS,
    OPTIMIZERS,
    SIZE,
    WIDE,
    Make,
    Textbook,
    differences,
    differing,
    everything,
    half_parameters,
    keeping,
    large_parameters,
    nine_parameters,
    set_most_gradients,
    two_groups,
)

pytestmark = pytest.mark.usefixtures("one_compute_thread")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLAIN_WAYS = ["subgroups", "moving", "slices"]
MASTER_WAYS = ["masters", "masters without a runtime"]


def parameters_of(way: str, dtype: torch.dtype) -> list[nn.Parameter]:
    """The last of them is to get no gradient."""
    if way == "slices":
        return large_parameters(dtype, (1553, 257) if dtype is FP32 else (1553, 514))
    if way in MASTER_WAYS:
        return half_parameters(dtype)
    return nine_parameters(dtype)


@dataclass(slots=True, kw_only=True)
class Run:
    """An optimizer, managed or as it is. own: the parameters, or the clones that a textbook loop updates in their place."""

    parameters: list[nn.Parameter]
    optimizer: Optimizer
    textbook: Textbook | None = None
    training: ManagedTraining | None = None
    managed: bool = True

    @property
    def own(self) -> list[Any]:
        return self.parameters if self.textbook is None else self.textbook.masters

    def step(self, *closure: Any, **named: Any) -> Any:
        return (self.textbook or self.optimizer).step(*closure, **named)

    def train(self, steps: int = 1, first: int = 0) -> None:
        for step in range(first, first + steps):
            set_most_gradients(self.parameters, step)
            self.step()

    def differences(self, expected: Run) -> list[str]:
        """From an unmanaged run, by name."""
        if expected.textbook is not None:
            return differences(self.optimizer, expected.textbook)
        return differing(everything(self.optimizer), everything(expected.optimizer))


def unmanaged(way: str, make: Make, dtype: torch.dtype) -> Run:
    parameters = parameters_of(way, dtype)
    if way in MASTER_WAYS:
        textbook = Textbook(parameters, make)
        return Run(parameters=parameters, optimizer=textbook.optimizer, textbook=textbook, managed=False)
    return Run(parameters=parameters, optimizer=make(parameters), managed=False)


Begin = Callable[..., Run]
SETTINGS: dict[str, dict[str, Any]] = {
    "subgroups": {"budget_bytes": None, "sizes": SubgroupSizes(used_bytes=4 * SIZE)},
    "moving": {"budget_bytes": 11 * SIZE},
    "masters": {"budget_bytes": 14 * WIDE},
}
"""Of `Training`."""


@pytest.fixture
def begin(request: pytest.FixtureRequest) -> Begin:
    """Begins a managed run."""

    def managed(way: str, make: Make, dtype: torch.dtype = FP32) -> Run:
        parameters = parameters_of(way, dtype)
        training: ManagedTraining | None = None
        if way == "slices":
            training = request.getfixturevalue("started_tiered")(parameters=parameters)
        elif way in SETTINGS:
            training = request.getfixturevalue("started")(parameters=parameters, **SETTINGS[way])
        optimizer = make(parameters)
        if way in MASTER_WAYS:
            request.getfixturevalue("monkeypatch").setattr(arithmetic, "SUBGROUP_BYTES", 2 * WIDE)
            keeping(optimizer)
        return Run(parameters=parameters, optimizer=optimizer, training=training)

    return managed


def check(run: Run, way: str, expected: Run) -> None:
    """That the results are the same, and that it was managed in this way."""
    assert run.differences(expected) == []
    if way in ("moving", "masters"):
        assert run.training is not None
        assert any(line.startswith("in ") for line in run.training.mover.log), "not all of it fits"  # type: ignore[attr-defined]
        assert way == "moving" or run.training.pager.account.peak_bytes <= 14 * WIDE


# -- every optimizer

EVERY = [
    *((way, name, FP32) for name in OPTIMIZERS for way in ("subgroups", "moving")),
    ("slices", "AdamW", BF16),  # in 32 bits: every one in `test_sliced.py`
    *(("masters without a runtime", name, HALF[number % 2]) for number, name in enumerate(MASTER_OPTIMIZERS)),
]


@pytest.mark.parametrize(("way", "name", "dtype"), EVERY, ids=str)
def test_every_optimizer(begin: Begin, way: str, name: str, dtype: torch.dtype) -> None:
    """With a scheduler. In 16 bits vectorised loops round otherwise than what they leave over, so slices leave over the same."""
    make = (MASTER_OPTIMIZERS if way in MASTER_WAYS else OPTIMIZERS)[name]
    run, expected = begin(way, make, dtype), unmanaged(way, make, dtype)
    groups = [list(map(id, group["params"])) for group in run.optimizer.param_groups]
    for each in (expected, run):
        scheduler = torch.optim.lr_scheduler.StepLR(each.optimizer, 2, gamma=0.5)
        for step in range(6):
            each.train(1, step)
            scheduler.step()
            assert each is expected or [list(map(id, group["params"])) for group in run.optimizer.param_groups] == groups
    if way == "slices":
        check_sliced(run.training, 2)  # type: ignore[arg-type]
    if way == "subgroups":
        assert run.training is not None and run.training.finished == [run.optimizer] * 6
        names = run.training.stage_names()
        count = len(names) // 6
        assert 4 <= count <= 9 and names == [f"optimizer/subgroup.{number}" for number in range(count)] * 6
    check(run, "" if name == "SGD" else way, expected)


# -- what user code does


def closure(run: Run) -> None:
    """It runs once, before anything is updated, and the step returns what it does."""
    for step in range(3):
        calls: list[int] = []

        def evaluate(step: int = step, calls: list[int] = calls) -> float:
            assert torch.is_grad_enabled() and all(group["params"] for group in run.optimizer.param_groups)
            calls.append(step)
            set_most_gradients(run.parameters, step)
            return step + 0.5

        if run.managed:
            assert (run.step(evaluate) if step else run.step(closure=evaluate)) == step + 0.5 and calls == [step]
        else:
            evaluate()
            run.step()


def growing(run: Run) -> None:
    run.train(3)
    run.optimizer.add_param_group({"params": run.own[3:], "lr": 0.1})
    run.train(3, 3)


def touching(run: Run) -> None:
    """User code reads and writes states, wherever they wait."""
    for step in range(4):
        run.train(1, step)
        for parameter in run.own[:-1]:
            run.optimizer.state[parameter]["exp_avg"].mul_(0.5)


def turning_to_momentum(run: Run) -> None:
    """A state that comes later."""
    run.train(2)
    for group in run.optimizer.param_groups:
        group["momentum"] = 0.9
    run.train(2, 2)


def sparse(run: Run) -> None:
    for value in (0.3, 0.7):
        weight = run.parameters[0]
        values = torch.full((2, weight.shape[1]), value, dtype=weight.dtype)
        weight.grad = torch.sparse_coo_tensor(torch.tensor([[1, 3]]), values, weight.shape, check_invariants=True)
        run.step()


def failing(run: Run) -> None:
    """In the middle of the first step: nothing is left behind that the next one takes for states, and nothing is held."""
    if run.managed:
        held = [[id(p) for p in group["params"]] for group in run.optimizer.param_groups]
        rates = [group["lr"] for group in run.optimizer.param_groups]
        run.optimizer.param_groups[0]["lr"] = "fast"
        with pytest.raises(TypeError):
            run.train()
        assert [[id(p) for p in group["params"]] for group in run.optimizer.param_groups] == held
        assert run.training is None or run.training.finished == []
        assert run.training is None or all(block.pins == 0 for block in run.training.pager.blocks)
        run.optimizer.param_groups[0]["lr"] = rates[0]
    run.train(3)


def interrupted(run: Run) -> None:
    """Between its hooks: the next one finds the parameters again, and the step that was done stays done."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    context = pytest.raises(KeyboardInterrupt) if run.managed else contextlib.nullcontext()
    with pytest.MonkeyPatch.context() as patch, context:
        if run.managed:
            patch.setattr(run.optimizer, "_optimizer_step_code", interrupt)
        run.train()
    run.train(1, 1)


def scaled(run: Run) -> None:
    """A scaler tells fused optimizers its scale, and which steps to leave out: the first, and one when there are states."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(5):
        set_most_gradients(run.parameters, step)
        if step in (0, 2):
            run.parameters[1].grad[0, 0] = torch.inf  # type: ignore[index]
        scaler.scale(torch.ones(1))
        scaler.step(run.optimizer)
        scaler.update()
    assert scaler.get_scale() == 1.0 and float(run.optimizer.state[run.parameters[1]]["step"]) == 3


def momentum(parameters: list[Any], count: int | None = None) -> Optimizer:
    return torch.optim.SGD(parameters[:count], lr=0.01, momentum=0.9)


ADAMW = two_groups(torch.optim.AdamW)
LOOPS: dict[str, tuple[Make, Callable[[Run], None], list[str]]] = {
    "closure": (ADAMW, closure, [*PLAIN_WAYS, *MASTER_WAYS]),
    "groups that are added later": (lambda parameters: momentum(parameters, 3), growing, [*PLAIN_WAYS, *MASTER_WAYS]),
    "user code touches states": (ADAMW, touching, [*PLAIN_WAYS, "masters"]),
    "a state that comes later": (two_groups(torch.optim.SGD), turning_to_momentum, [*PLAIN_WAYS, "masters"]),
    "sparse gradients": (lambda parameters: torch.optim.SGD(parameters, lr=0.1), sparse, ["subgroups", *MASTER_WAYS]),
    "an error in the middle of a step": (momentum, failing, [*PLAIN_WAYS, *MASTER_WAYS]),
    "a step that is interrupted": (ADAMW, interrupted, [*PLAIN_WAYS, *MASTER_WAYS]),
    "a gradient scaler": (two_groups(torch.optim.AdamW, fused=True), scaled, PLAIN_WAYS),
}


@pytest.mark.parametrize(("name", "way"), [(name, way) for name, (_, _, ways) in LOOPS.items() for way in ways])
def test_what_user_code_does(begin: Begin, name: str, way: str) -> None:
    make, loop, _ = LOOPS[name]
    dtype = BF16 if way in MASTER_WAYS else FP32
    run, expected = begin(way, make, dtype), unmanaged(way, make, dtype)
    loop(expected)
    loop(run)
    assert run.differences(expected) == []
    if run.training is not None:
        assert run.training.finished and "optimizer/subgroup.0" in run.training.stage_names()
    assert run.training is None or all(block.pins == 0 for block in run.training.pager.blocks)
