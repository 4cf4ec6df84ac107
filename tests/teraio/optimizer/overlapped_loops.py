"""Loops as users write them, with and without updates inside the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..parity.harness import Case, Result, Run, check_exact, one_update, start, train
from ..parity.optimizers import mirrored

STEPS = 7

Step = Callable[[Run, Tensor, int], None]

ALL = {f"{layer}.{kind}" for layer in ("first", "second", "last") for kind in ("weight", "bias")}


class Net(nn.Module):
    """Two layers; `broken`: a graph break in between, after which the first weight is used again."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.broken:
            torch._dynamo.graph_break()
            x = torch.tanh(x @ self.first.weight)
        return self.last(torch.tanh(self.second(x)))


def inputs(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 16, generator=generator) for _ in range(steps)]


def adamw(module: nn.Module) -> Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def fused(module: nn.Module) -> Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)


def case(
    step: Step = one_update,
    *,
    make_module: Callable[[], nn.Module] = Net,
    make: Callable[[Any], Optimizer | list[Optimizer]] = adamw,
    steps: int = STEPS,
) -> Case:
    """Training stays on demand."""
    return Case(
        make_model=make_module,
        make_batches=inputs,
        compute_loss=mirrored,
        make_optimizer=make,
        step=step,
        steps=steps,
        options={"profile_iterations": 1000},
    )


OVERLAPPED = {"overlap_step": True}


def same(step: Step = one_update, **settings: Any) -> Result:
    """The loop with the option, after a comparison with the loop without it, bit for bit."""
    expected = train(case(step, **settings))
    found = train(case(step, **settings), options=OVERLAPPED)
    check_exact(found, expected)
    return found


def running(steps: int = 5, **settings: Any) -> Run:
    """A loop that goes on, in which parameters are updated inside the backward pass."""
    run = start(case(steps=steps, **settings), options=OVERLAPPED)
    run.go(inputs(steps))
    assert run.left[-1] == set()
    return run


# -- steps


def between(act: Callable[[Run, int], Any]) -> Step:
    """User code acts between backward and step."""

    def step(run: Run, x: Tensor, index: int) -> None:
        run.backward(x)
        act(run, index)
        run.update()

    return step


def passing(passes: Callable[[Run, Tensor], Any]) -> Step:
    """User code runs the passes in another way."""

    def step(run: Run, x: Tensor, index: int) -> None:
        passes(run, x)
        run.note_left()
        run.update()

    return step


def graph_kept(run: Run, x: Tensor, index: int) -> None:
    run.backward(x, retain_graph=True)
    run.update()


def retained(run: Run, x: Tensor) -> None:
    loss = run.loss(x)
    loss.backward(retain_graph=True)
    run.optimizer.zero_grad()
    loss.backward()


def scaler_of(run: Run) -> Any:
    return run.kept.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=8.0))


def penalty(run: Run) -> Tensor:
    """Eager code's, on one parameter."""
    found: Tensor = run.module.second.weight.square().sum()
    return found


def once(then: Step) -> Step:
    return lambda run, x, index: then(run, x, index) if index == 5 else one_update(run, x, index)


def before(act: Callable[[Run], Any]) -> Step:
    """User code acts before the sixth step."""

    def step(run: Run, x: Tensor, index: int) -> None:
        act(run)
        one_update(run, x, index)

    return once(step)
