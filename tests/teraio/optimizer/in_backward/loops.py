"""Loops as users write them, with and without updates inside the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.optim import Optimizer

from ....training import begin, compiled, unequal
from ..plain_training import everything

STEPS = 7


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


@dataclass(kw_only=True)
class Loop:
    """A user's loop under `teraio`, with what it has seen. left: after each backward pass, who has a gradient."""

    overlap: bool
    make_module: Callable[[], Any] = Net
    make: Callable[[Any], Optimizer | list[Optimizer]] = lambda module: torch.optim.AdamW(module.parameters(), lr=0.01)
    seen: list[Tensor] = field(default_factory=list)
    left: list[set[str]] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        training = begin(self.make_module, self._optimizers, self.options)
        self.module, self.model, (self.optimizer, *self.others) = training.module, training.model, training.optimizers
        self.generator = torch.Generator().manual_seed(1)

    def _optimizers(self, module: nn.Module) -> list[Optimizer]:
        made = self.make(module)
        return made if isinstance(made, list) else [made]

    @property
    def options(self) -> dict[str, Any]:
        """Of the backend: training stays on demand."""
        return {"profile_iterations": 1000, "overlap_step": self.overlap}

    def loss(self) -> Tensor:
        x = torch.randn(4, 16, generator=self.generator)
        loss: Tensor = (self.model(x) - x.flip(0)).square().mean()
        self.seen.append(loss.detach().clone())
        return loss

    def backward(self, **settings: Any) -> None:
        self.loss().backward(**settings)
        self.note()

    def note(self) -> None:
        self.left.append({name for name, p in self.module.named_parameters() if p.grad is not None})

    def step(self) -> None:
        for optimizer in (self.optimizer, *self.others):
            optimizer.step()
            optimizer.zero_grad()

    def everything(self) -> list[Tensor]:
        values = [p.detach().clone() for p in self.module.parameters()]
        return [*self.seen, *values, *everything(self.optimizer, *self.others).values()]


Step = Callable[[Loop, int], None]

ALL = {f"{layer}.{kind}" for layer in ("first", "second", "last") for kind in ("weight", "bias")}


def plain(loop: Loop, index: int) -> None:
    loop.backward()
    loop.step()


def run(step: Step, overlap: bool, steps: int = STEPS, **settings: Any) -> Loop:
    loop = Loop(overlap=overlap, **settings)
    for index in range(steps):
        step(loop, index)
    return loop


def same(step: Step, **settings: Any) -> Loop:
    """The loop with the option, after a comparison with the loop without it, bit for bit."""
    expected = run(step, False, **settings).everything()
    loop = run(step, True, **settings)
    assert not unequal(loop.everything(), expected)
    return loop


# -- what users do


def hooked_step(loop: Loop, index: int) -> None:
    if index == 0:
        loop.optimizer.register_step_pre_hook(lambda *_: None)
    plain(loop, index)


def closure(loop: Loop, index: int) -> None:
    def evaluate() -> Tensor:
        loop.optimizer.zero_grad()
        loss = loop.loss()
        loss.backward()
        loop.note()
        return loss

    loop.optimizer.step(evaluate)  # type: ignore[arg-type]


def clipped_norm(loop: Loop, index: int) -> None:
    loop.backward()
    nn.utils.clip_grad_norm_(loop.module.parameters(), 0.01)
    loop.step()


def clipped_in_vain(loop: Loop, index: int) -> None:
    """To a norm that no gradient reaches: one day one may."""
    loop.backward()
    nn.utils.clip_grad_norm_(loop.module.parameters(), 1e9)
    loop.step()


def clipped_value(loop: Loop, index: int) -> None:
    loop.backward()
    nn.utils.clip_grad_value_(loop.module.parameters(), 1e-3)
    loop.step()


def clipped_data(loop: Loop, index: int) -> None:
    loop.backward()
    for parameter in loop.module.parameters():
        assert parameter.grad is not None
        parameter.grad.data.clamp_(-1e-3, 1e-3)
    loop.step()


def scaler_of(loop: Loop) -> Any:
    return loop.kept.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=8.0))


def scaled(loop: Loop, index: int) -> None:
    scaler_of(loop).scale(loop.loss()).backward()
    loop.note()
    scaler_of(loop).step(loop.optimizer)
    scaler_of(loop).update()
    loop.optimizer.zero_grad()


def accumulated(loop: Loop, index: int) -> None:
    loop.backward()
    loop.backward()
    loop.step()


def zeroed_in_place(loop: Loop, index: int) -> None:
    loop.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)


def retained(loop: Loop, index: int) -> None:
    loss = loop.loss()
    loss.backward(retain_graph=True)
    loop.optimizer.zero_grad()
    loss.backward()
    loop.note()
    loop.step()


def graph_kept(loop: Loop, index: int) -> None:
    loop.backward(retain_graph=True)
    loop.step()


def penalised(loop: Loop, index: int) -> None:
    """Eager code contributes to all gradients."""
    (loop.loss() + sum(p.square().sum() for p in loop.module.parameters())).backward()  # type: ignore[union-attr]
    loop.note()
    loop.step()


def new_rate_before_each_step(loop: Loop, index: int) -> None:
    loop.backward()
    loop.optimizer.param_groups[0]["lr"] = 0.01 / (index + 1)
    loop.step()


def looked_at_before_each_step(loop: Loop, index: int) -> None:
    loop.backward()
    with torch.no_grad():
        loop.seen.append(loop.model(torch.ones(2, 16)).clone())
    loop.step()


def from_elsewhere(loop: Loop, index: int) -> None:
    """The graph's inputs are computed from the parameters: what it returns are no gradients of leaves."""
    computed = {name: 2 * p for name, p in loop.module.named_parameters()}
    model = loop.kept.setdefault("model", compiled(functional, loop.options))
    loss = model(loop.module, computed, torch.randn(4, 16, generator=loop.generator)).square().mean()
    loss.backward()
    loop.note()
    loop.step()


def functional(module: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    result: Tensor = torch.func.functional_call(module, parameters, (x,))
    return result


def fused(module: nn.Module) -> Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)


class Own(torch.optim.AdamW):
    """Of the user's, who may do as he likes."""


def checkpointed(loop: Loop, index: int) -> None:
    """The forward pass runs again when backward needs it."""
    x = torch.randn(4, 16, generator=loop.generator)
    result = torch.utils.checkpoint.checkpoint(loop.model, x, use_reentrant=False)
    result.square().mean().backward()
    loop.note()
    loop.step()


def new_memory_before_each_step(loop: Loop, index: int) -> None:
    loop.backward()
    for parameter in loop.module.parameters():
        parameter.data = parameter.data.clone()
    loop.step()
