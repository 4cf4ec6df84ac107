"""Optimizers outside of torch.optim: by the user's promise they are updated by subgroups and slices, with the same bits."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import teraio
from teraio.registry import REGISTRY, STEPS

from ...training import MIB, begin, compiled, unequal
from ..parity.harness import compiled_input_needs_grad


class Lion(Optimizer):
    """One moment, and the sign of an interpolation. Chen et al., Symbolic Discovery of Optimization Algorithms, 2023."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(group, parameter, self.state[parameter])

    def update(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Tensor]) -> None:
        if not state:
            state["moment"] = torch.zeros_like(parameter)
        change = state["moment"].lerp(parameter.grad, 0.1).sign()  # type: ignore[arg-type]
        state["moment"].lerp_(parameter.grad, 0.01)  # type: ignore[arg-type]
        parameter.sub_(change, alpha=group["lr"])


class Mixed(Lion):
    """AdamW with masters of its own: bf16 weights, and in fp32 the master and both moments."""

    def update(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> None:
        if not state:
            state |= {"step": 0, "master": parameter.float(), "mean": torch.zeros_like(parameter, dtype=torch.float32)}
            state["square"] = torch.zeros_like(state["mean"])
        gradient, state["step"] = parameter.grad.float(), state["step"] + 1  # type: ignore[union-attr]
        state["mean"].lerp_(gradient, 0.1)
        state["square"].lerp_(gradient.square(), 0.01)
        scale = (state["square"] / (1 - 0.99 ** state["step"])).sqrt_().add_(1e-8)
        state["master"].addcdiv_(state["mean"], scale, value=-group["lr"] / (1 - 0.9 ** state["step"]))
        parameter.copy_(state["master"])


class Normed(Lion):
    """The gradient over its norm: of a parameter as a whole."""

    def update(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Tensor]) -> None:
        parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=group["lr"])  # type: ignore[operator,union-attr]


class Clipping(Lion):
    """The gradients over the norm of all."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1e-3)
        super().step.__wrapped__(self)  # type: ignore[attr-defined]


class Counting(Lion):
    """Counts its steps for the whole group, as some do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step.__wrapped__(self)  # type: ignore[attr-defined]


class Wrapper(Optimizer):
    """Around another optimizer, and never initialised itself, as some are."""

    def __init__(self, parameters: Any) -> None:
        self.state, self.param_groups = (inner := Lion(parameters)).state, inner.param_groups

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


class Remembering(Lion):
    """Keeps what it has seen last in an object of its own."""

    def update(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Tensor]) -> None:
        self.seen = object()


class Noisy(Lion):
    def update(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Tensor]) -> None:
        parameter.add_(torch.randn_like(parameter), alpha=group["lr"])


class Prepared(Lion):
    """Makes its states before the first step."""

    def update(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Tensor]) -> None:
        parameter.sub_(state["moment"])


def model(width: int, layers: int, dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to(dtype)


@pytest.mark.parametrize(
    ("made", "independent", "width", "layers", "budget"),
    [(Lion, "parameters", 512, 12, 14 * MIB), (Mixed, "elements", 1024, 3, 20 * MIB), (Normed, "parameters", 512, 12, 14 * MIB)],
)
def test_steps_have_the_same_bits_within_the_budget(
    made: Callable[..., Optimizer],
    independent: Any,
    width: int,
    layers: int,
    budget: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The large parameters of the second case are updated by slices. After a promise, a checkpoint is as any other."""
    dtype = torch.bfloat16 if made is Mixed else torch.float32

    def train(options: dict[str, Any] | None, promised: bool) -> list[Tensor]:
        training = begin(lambda: model(width, layers, dtype), lambda module: [made(module.parameters())], options)
        if promised:
            teraio.manage_optimizer(training.optimizers[0], independent=independent)
        for number in range(5):
            inputs = torch.randn(16, width, generator=torch.Generator().manual_seed(number)).to(dtype)
            training.run([inputs], planned=True)
            for status in training.progress[-1]:
                assert status.device_peak_bytes <= budget
        states = training.optimizers[0].state_dict()["state"]
        kept = [value.clone() for number in states for value in states[number].values() if isinstance(value, Tensor)]
        return [*training.finish().values(), *kept]

    with caplog.at_level(logging.INFO, "teraio"):
        small = train({"memory_budget": budget, "storage": tmp_path, "host_updates": False}, promised=True)
    assert "updated as a whole" not in caplog.text
    assert not unequal(small, train(None, promised=False))


def test_masters_are_kept_for_an_optimizer_with_a_promise() -> None:
    optimizer = Lion([parameter := nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))], lr=1e-4)
    with pytest.raises(teraio.UnsupportedError, match="not known to treat each parameter by itself"):
        teraio.manage_optimizer(optimizer, master_weights=True)
    teraio.manage_optimizer(optimizer, independent="elements", master_weights=True)
    teraio.manage_optimizer(optimizer, master_weights=True)  # twice does no harm
    parameter.grad = torch.ones_like(parameter)
    for _ in range(3):
        optimizer.step()
    torch.testing.assert_close(optimizer.state[parameter]["master_param"], torch.full((4, 4), 1 - 3e-4))
    assert optimizer.state[parameter]["moment"].dtype == torch.float32 and parameter.eq(1).all()


@pytest.mark.parametrize(
    ("made", "independent", "found"),
    [
        (Normed, "elements", "the update of one element depends on another one"),
        (Clipping, "parameters", "the update of one parameter depends on another one"),
        (Counting, "parameters", "its step changes the group's 'count'"),
        (Wrapper, "parameters", "Wrapper.step has no hooks of torch.optim.Optimizer; derive the class from it"),
        (Remembering, "parameters", "its step changes self.seen"),
        (Noisy, "elements", "depends on another one"),
        (Prepared, "elements", "a step with new parameters raises KeyError"),
    ],
)
def test_a_promise_that_a_trial_breaks_is_refused(made: Callable[..., Optimizer], independent: Any, found: str) -> None:
    """And changes neither the optimizer nor the random numbers."""
    parameters = [nn.Parameter(torch.ones(4, 4)) for _ in range(3)]
    optimizer, before = made(parameters), torch.get_rng_state()
    with pytest.raises(teraio.UnsupportedError, match=found):
        teraio.manage_optimizer(optimizer, independent=independent)
    assert not optimizer.state and optimizer.param_groups[0].get("count") is None
    assert all(parameter.eq(1).all() for parameter in parameters) and torch.equal(torch.get_rng_state(), before)
    with pytest.raises(teraio.OptionsError, match="'parameters' or 'elements'"):
        teraio.manage_optimizer(optimizer, independent="all")  # type: ignore[arg-type]


# -- what the log tells of optimizers whose parameters are in no compiled graph


class Recurrent(nn.Module):
    """Dynamo leaves all of it out."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(256, 512, batch_first=True), nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(x)[0])
        return y


@pytest.fixture
def first_steps(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As in a process that has called torch.compile with teraio, and in which nothing has run."""
    caplog.set_level(logging.WARNING, logger="teraio")
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(STEPS, "_had_runs", False)
    importlib.import_module("teraio.backend")


def train(model: Any, module: nn.Module, x: Tensor, steps: int = 4) -> Optimizer:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.usefixtures("first_steps")
def test_nothing_was_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Said once, with the reason."""
    module = Recurrent()
    model = compiled(module, {"memory_budget": 64 << 20, "storage": str(tmp_path)})
    train(model, module, torch.ones(2, 3, 256))
    train(model, module, torch.ones(2, 3, 256))
    (said,) = caplog.messages
    assert said.startswith(
        "SGD steps, but torch.compile has not given teraio any graph: this training is not managed (graph breaks: "
    )
    assert "RNN, GRU, or LSTM" in said and "TORCH_LOGS=graph_breaks" in said


@compiled_input_needs_grad
@pytest.mark.usefixtures("first_steps")
def test_most_was_not_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Only the head was, by itself."""
    module = Recurrent()
    options = {"memory_budget": 64 << 20, "storage": str(tmp_path)}
    head = compiled(module.head.forward, options)
    train(lambda x: head(module.lstm(x)[0]), module, torch.ones(2, 3, 256))
    (said,) = caplog.messages
    outside = sum(parameter.nbytes for parameter in module.lstm.parameters())
    total = sum(parameter.nbytes for parameter in module.parameters())
    assert said.startswith(f"SGD updates {total:,} bytes of parameters, and {outside:,} of them are in no graph")


class Whole(nn.Module):
    """Is compiled as a whole. frozen: a part without gradients, which no optimizer changes."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.frozen = nn.Linear(512, 512), nn.Linear(1024, 1024)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x)
        return y


@pytest.mark.usefixtures("first_steps")
def test_nothing_is_said_where_all_is_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Compiled as a whole; then an eager model without a run, as after `teraio.reset()`; then a tiny optimizer."""
    module = Whole()
    train(compiled(module, {"memory_budget": 64 << 20, "storage": str(tmp_path)}), module, torch.ones(2, 512))
    REGISTRY.reset()
    train(module, module, torch.ones(2, 512))
    tiny = nn.Linear(4, 4)
    train(tiny, tiny, torch.ones(2, 4))
    assert not caplog.messages
