"""Loops in which parameters are updated inside the backward pass: with every optimizer, and with graphs of many kinds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import teraio

from ....training import compiled
from ...parity.optimizers import KINDS
from .loops import ALL, STEPS, Loop, Net, plain, same

# Dynamo looks at it where what another graph has made enters a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")

OPTIONS = {"codegen": "eager", "profile_iterations": 1000}
WEIGHTS = {name for name in ALL if name.endswith("weight")}


EVERY: dict[str, Callable[[Any], Optimizer]] = {
    **KINDS,
    "AdamW, learning rate in a tensor": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01)),
    "AdamW maximize": lambda parameters: torch.optim.AdamW(parameters, maximize=True, weight_decay=0.1),
}


class Row(nn.Sequential):
    """A layer for each optimizer."""

    def __init__(self) -> None:
        super().__init__(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in EVERY])


def test_every_optimizer() -> None:
    """In one training: compiling takes longer than updates."""

    def make(module: nn.Module) -> list[Optimizer]:
        return [kind(list(layer.parameters())) for kind, layer in zip(EVERY.values(), module.children(), strict=True)]

    loop = same(plain, make_module=Row, make=make)
    kept = {f"{list(EVERY).index('Muon')}.0.bias"}  # which it has not got
    assert loop.left == [{name for name, _ in loop.module.named_parameters()}] * 3 + [kept] * (STEPS - 3)


@pytest.mark.parametrize("kind", ["AdamW", "AdamW fused", "SGD", "SGD momentum", "Muon"])
def test_parameters_in_half_precision(kind: str) -> None:
    """Updated over masters in fp32."""

    def make(module: nn.Module) -> Optimizer:
        optimizer = KINDS[kind](list(module.bfloat16().parameters()))
        teraio.manage_optimizer(optimizer, master_weights=True)
        return optimizer

    def in_half(loop: Loop, index: int) -> None:
        x = torch.randn(4, 16, generator=loop.generator).bfloat16()
        loss = loop.model(x).square().mean()
        loss.backward()
        loop.seen.append(loss.detach().clone())
        loop.note()
        loop.step()

    loop = same(in_half, make=make)
    kept = ALL - WEIGHTS if kind == "Muon" else set()
    assert loop.left == [ALL] * 3 + [kept] * (STEPS - 3)
    assert loop.optimizer.state[loop.module.first.weight]["master_param"].dtype == torch.float32


def test_a_checkpoint_is_loaded_on_the_way() -> None:
    def loading(loop: Loop, index: int) -> None:
        plain(loop, index)
        if index == 3:
            loop.kept["saved"] = {"model": loop.module.state_dict(), "optimizer": loop.optimizer.state_dict()}
            loop.kept["saved"] = torch.utils._pytree.tree_map_only(Tensor, torch.clone, loop.kept["saved"])
        if index == 5:
            loop.module.load_state_dict(loop.kept["saved"]["model"])
            loop.optimizer.load_state_dict(loop.kept["saved"]["optimizer"])

    assert same(loading, steps=9).left[3:] == [set()] * 6


def test_one_graph_for_several_layers() -> None:
    """The same code runs for each layer, with parameters of its own."""

    def by_layers(loop: Loop, index: int) -> None:
        layers = (loop.module.first, loop.module.second, loop.module.last)
        parts = loop.kept.setdefault("parts", [compiled(layer, loop.options) for layer in layers])
        x = torch.randn(4, 16, generator=loop.generator).requires_grad_()
        for part in parts:
            x = torch.tanh(part(x))
        loop.seen.append(x.detach().clone())
        x.square().mean().backward()
        loop.note()
        loop.step()

    assert same(by_layers).left == [ALL] * 3 + [set()] * (STEPS - 3)


def test_a_generator_and_a_discriminator() -> None:
    """The discriminator gets gradients of the generator's loss as well, and of two passes: its own step is as ever."""

    def adversarial(loop: Loop, index: int) -> None:
        if "other" not in loop.kept:
            other = loop.kept["module"] = Net()
            loop.kept["judge"] = compiled(other, loop.options)
            loop.kept["other"] = torch.optim.AdamW(other.parameters(), lr=0.01)
        judge, noise = loop.kept["judge"], torch.randn(4, 16, generator=loop.generator)
        loop.kept["other"].zero_grad()
        judge(torch.ones(4, 16)).mean().backward()
        with torch.no_grad():
            made = loop.model(noise)
        (-judge(made).mean()).backward()
        loop.kept["other"].step()
        judge(loop.model(noise)).mean().backward()
        loop.seen += [p.detach().clone() for p in loop.kept["module"].parameters()]
        loop.seen += [p.grad.clone() for p in loop.kept["module"].parameters()]
        loop.note()
        loop.step()

    assert same(adversarial).left == [ALL] * 3 + [set()] * (STEPS - 3)


def test_the_option_and_a_step_in_the_phase_fits() -> None:
    """Where all fits, iterations run unmanaged, and the step updates."""
    loop = Loop(overlap=True)
    loop.model = compiled(loop.module, {"overlap_step": True})
    phases = []
    for index in range(10):
        plain(loop, index)
        phases.append(teraio.status()[0].phase)
    first = phases.index("fits")
    assert loop.left == [ALL] * 3 + [set()] * (first - 2) + [ALL] * (9 - first) and first > 3


# -- what one graph may do


class Sum(nn.Module):
    """Two parameters with one and the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.other = (nn.Parameter(torch.randn(16, 16)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ (self.one + self.two)) @ self.other


class AsIs(torch.autograd.Function):
    """Hands the weight itself on as the gradient of `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x + 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return weight.view(weight.shape), None


class Lent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return (AsIs.apply(x, self.weight) @ self.other).tanh() @ torch.tanh(self.weight)  # type: ignore[no-untyped-call]


def with_gradient_of_the_input(loop: Loop, index: int) -> None:
    x = torch.randn(16, 16, generator=loop.generator).requires_grad_()
    loop.model(3 * x).square().mean().backward()
    assert x.grad is not None
    loop.seen.append(x.grad)
    loop.note()
    loop.step()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
@pytest.mark.parametrize(
    ("kind", "refused", "reason"),
    [
        (Sum, {"one", "two"}, "others contribute to its gradient, or get hold of it"),
        (Lent, {"weight"}, "the backward graph returns a view of it"),
    ],
)
def test_what_is_shared(kind: type[nn.Module], refused: set[str], reason: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="teraio"):
        assert same(with_gradient_of_the_input, make_module=kind).left[3:] == [refused] * (STEPS - 3)
    assert reason in caplog.text
