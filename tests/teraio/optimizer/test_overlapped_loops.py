"""Loops in which parameters are updated inside the backward pass: with every optimizer, and with graphs of many kinds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

import teraio
from teraio.optimizer.final_gradients import FinalGradient
from teraio.optimizer.overlapped_steps import cut_updates

from ...training import compiled
from ..parity.harness import Run, compiled_input_needs_grad, one_update, train
from ..parity.optimizers import KINDS
from .overlapped_loops import (
    ALL,
    STEPS,
    Net,
    Step,
    before,
    case,
    fused,
    inputs,
    once,
    passing,
    penalty,
    retained,
    running,
    same,
    scaler_of,
)

pytestmark = compiled_input_needs_grad


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

    result = same(make_module=Row, make=make)
    kept = {f"{list(EVERY).index('Muon')}.0.bias"}  # which it has not got
    assert result.left == [set(result.parameters)] * 3 + [kept] * (STEPS - 3)


@pytest.mark.parametrize("kind", ["AdamW fused", "Muon"])
def test_parameters_in_half_precision(kind: str) -> None:
    """Updated over masters in fp32."""

    def make(module: nn.Module) -> Optimizer:
        optimizer = KINDS[kind](list(module.bfloat16().parameters()))
        teraio.manage_optimizer(optimizer, master_weights=True)
        return optimizer

    def in_half(run: Run, x: Tensor) -> None:
        loss = run.model(x.bfloat16()).square().mean()
        loss.backward()
        run.record_loss(loss)

    result = same(passing(in_half), make=make)
    kept = {name for name in ALL if name.endswith("bias")} if kind == "Muon" else set()
    assert result.left == [ALL] * 3 + [kept] * (STEPS - 3)
    assert result.states["master_param of 0"].dtype == torch.float32


def test_one_graph_for_several_layers() -> None:
    """The same code runs for each layer, with parameters of its own."""

    def by_layers(run: Run, x: Tensor, index: int) -> None:
        layers = (run.module.first, run.module.second, run.module.last)
        parts = run.kept.setdefault("parts", [compiled(layer, run.options) for layer in layers])
        x = x.requires_grad_()
        for part in parts:
            x = torch.tanh(part(x))
        run.record("seen", x.detach().clone())
        x.square().mean().backward()
        run.note_left()
        run.update()

    assert same(by_layers).left == [ALL] * 3 + [set()] * (STEPS - 3)


def test_a_generator_and_a_discriminator() -> None:
    """The discriminator gets gradients of the generator's loss as well, and of two passes: its own step is as ever."""

    def adversarial(run: Run, x: Tensor, index: int) -> None:
        if "other" not in run.kept:
            other = run.kept["module"] = Net()
            run.kept["judge"] = compiled(other, run.options)
            run.kept["other"] = torch.optim.AdamW(other.parameters(), lr=0.01)
        judge = run.kept["judge"]
        run.kept["other"].zero_grad()
        judge(torch.ones(4, 16)).mean().backward()
        with torch.no_grad():
            made = run.model(x)
        (-judge(made).mean()).backward()
        run.kept["other"].step()
        judge(run.model(x)).mean().backward()
        for name, parameter in run.kept["module"].named_parameters():
            run.record(name, parameter)
            run.record(f"gradient of {name}", parameter.grad)
        run.note_left()
        run.update()

    assert same(adversarial).left == [ALL] * 3 + [set()] * (STEPS - 3)


def test_the_option_and_a_step_in_the_phase_fits() -> None:
    """Where all fits, iterations run unmanaged, and the step updates."""
    result = train(case(steps=10), options={"overlap_step": True, "profile_iterations": 3})
    first = [status.phase for (status,) in result.progress].index("fits")
    assert result.left == [ALL] * 3 + [set()] * (first - 2) + [ALL] * (9 - first) and first > 3


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


def with_gradient_of_the_input(run: Run, x: Tensor) -> None:
    x = x.repeat(4, 1).requires_grad_()
    run.model(3 * x).square().mean().backward()
    assert x.grad is not None
    run.record("gradient of the input", x.grad)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
@pytest.mark.parametrize(
    ("kind", "refused", "reason"),
    [
        (Sum, {"one", "two"}, "others contribute to its gradient, or get hold of it"),
        (Lent, {"weight"}, "the backward graph returns a view of it"),
    ],
)
def test_what_is_shared(kind: type[nn.Module], refused: set[str], reason: str, caplog: pytest.LogCaptureFixture) -> None:
    assert same(passing(with_gradient_of_the_input), make_module=kind).left[3:] == [refused] * (STEPS - 3)
    assert reason in caplog.text


# -- what comes later and is not in the way


def new_optimizer(run: Run) -> None:
    run.optimizers[0] = torch.optim.SGD(run.module.parameters(), lr=0.1, momentum=0.9)


def of_two_layers(module: Any) -> Optimizer:
    return torch.optim.AdamW([*module.first.parameters(), *module.last.parameters()], lr=0.01)


def adding(run: Run, x: Tensor, index: int) -> None:
    if index == 4:
        run.optimizer.add_param_group({"params": list(run.module.second.parameters()), "lr": 0.1})
    run.module.second.zero_grad()
    one_update(run, x, index)


def lowering_the_rate(run: Run, x: Tensor, index: int) -> None:
    one_update(run, x, index)
    run.optimizer.param_groups[0]["lr"] *= 0.9


def growing(run: Run, x: Tensor, index: int) -> None:
    one_update(run, x if index < 5 else x.repeat(2, 1), index)


INSIDE: list[set[str]] = [ALL] * 3 + [set()] * 2
"""Who has a gradient after the first five passes."""
ADDED = {"second.weight", "second.bias"}
NEW: dict[str, tuple[Step, Any, list[set[str]]]] = {
    "settings": (lowering_the_rate, None, [*INSIDE, set(), set()]),
    "a graph for another size is watched first": (growing, None, [*INSIDE, ALL, set(), set()]),
    "parameters that are added": (adding, of_two_layers, [ALL] * 3 + [ADDED] * 4 + [set()] * 2),
    "a new optimizer takes over": (before(new_optimizer), None, [*INSIDE, ALL, ALL, ALL, set(), set()]),
    # The step makes them.
    "states that were taken away": (before(lambda run: run.optimizer.state.clear()), None, [*INSIDE, ALL, set(), set()]),
    # The first pass returns its gradients; the second, for which they were set to None, need not.
    "passes over a graph that was kept": (once(passing(retained)), None, [*INSIDE, set(), set()]),
}


@pytest.mark.parametrize("name", NEW)
def test_what_is_new(name: str) -> None:
    step, make, left = NEW[name]
    assert same(step, steps=len(left), **({"make": make} if make else {})).left == left


# -- errors: what has been updated cannot be undone


def test_a_second_backward_pass_before_the_step() -> None:
    run, (x,) = running(), inputs(1)
    run.backward(x)
    before = [value.clone() for value in (*run.module.state_dict().values(), *run.states().values())]
    loss = run.loss(x)
    with pytest.raises(teraio.UnsupportedError) as caught:
        loss.backward()
    assert str(caught.value) == (
        "parameter 'first.weight' was updated inside the backward pass, and a second backward pass wants to add to its "
        "gradient before optimizer.step(), which overlap_step cannot do; if the iteration was interrupted, end it by "
        "optimizer.step(); otherwise leave out the option overlap_step, and restart from the last checkpoint"
    )
    after = (*run.module.state_dict().values(), *run.states().values())
    assert all(map(torch.equal, after, before)), "nothing was changed"
    assert all(p.grad is None for p in run.module.parameters())
    run.update()
    one_update(run, x, 9)


def test_a_backward_pass_that_was_interrupted() -> None:
    """The error of the next one says how to go on."""
    run, (x,) = running(), inputs(1)
    loss = run.loss(x)
    node = loss.grad_fn
    while node is not None and "CompiledFunction" not in node.name():
        node = node.next_functions[0][0]
    assert node is not None

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    node.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    with pytest.raises(teraio.UnsupportedError, match=r"if the iteration was interrupted, end it by optimizer\.step\(\)"):
        run.loss(x).backward()
    run.update()
    one_update(run, x, 9)


def eager_code_contributes(run: Run, x: Tensor) -> None:
    (run.loss(x) + penalty(run)).backward()
    run.optimizer.step()


def another_optimizer(run: Run, x: Tensor) -> None:
    other = torch.optim.SGD(run.module.last.parameters(), lr=0.1)
    run.backward(x)
    other.step()


def scaled_later(run: Run, x: Tensor) -> None:
    scaler_of(run).scale(run.loss(x)).backward()
    run.optimizer.found_inf = torch.zeros(())
    run.optimizer.step()


@pytest.mark.parametrize(
    ("then", "error"),
    [
        (eager_code_contributes, "'second.weight' was .* but got another gradient after that, from outside"),
        (another_optimizer, r"'last.weight' was .* but another optimizer has it as well; leave out"),
        (scaled_later, "but its gradient was scaled by a GradScaler"),
    ],
)
def test_what_comes_too_late(then: Callable[[Run, Tensor], None], error: str) -> None:
    run, (x,) = running(make=fused), inputs(1)
    with pytest.raises(teraio.UnsupportedError, match=error):
        then(run, x)


# -- how updates within a backward graph are cut into stages


class Planned:
    """What `cut_updates` looks at: the optimizer, the bytes, and the stage."""

    def __init__(self, optimizer: object, size_bytes: int, after: int) -> None:
        self.facts, self.size_bytes, self.final = optimizer, size_bytes, FinalGradient(slot=0, after=after)


ONE, OTHER = object(), object()


def cut(members: Sequence[Planned], largest_bytes: int) -> list[tuple[int, list[Planned]]]:
    return cut_updates(members, largest_bytes)  # type: ignore[arg-type,return-value]


@given(
    members=st.lists(
        st.builds(Planned, st.sampled_from([ONE, OTHER]), st.integers(1, 12 << 20), st.integers(0, 6)), min_size=1, max_size=12
    ),
    largest=st.integers(0, 32 << 20),
)
def test_each_is_updated_once_and_not_too_early(members: list[Planned], largest: int) -> None:
    stages = cut(members, largest)
    assert Counter(member for _, own in stages for member in own) == Counter(members)
    assert [after for after, _ in stages] == sorted(after for after, _ in stages)
    for after, own in stages:
        assert after == max(member.final.after for member in own)
        assert len({member.facts for member in own}) == 1
        size, last = sum(member.size_bytes for member in own), own[-1].size_bytes
        assert size <= largest or len(own) == 1 or 2 * (size - last) < largest
