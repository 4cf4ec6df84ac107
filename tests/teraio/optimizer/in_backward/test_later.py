"""What comes in the way when parameters are updated inside the backward pass already, and what comes too late."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import teraio

from .loops import ALL, Loop, Step, fused, graph_kept, plain, retained, run, same, scaler_of

# Dynamo looks at it where what eager code or another graph has made enters a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")


# -- in the way later on, when parameters are updated inside the backward pass already


def after(count: int, then: Step) -> Step:
    return lambda loop, index: plain(loop, index) if index < count else then(loop, index)


def once(count: int, then: Step) -> Step:
    return lambda loop, index: then(loop, index) if index == count else plain(loop, index)


def late_hook(loop: Loop, index: int) -> None:
    if index == 5:
        loop.module.second.weight.register_hook(lambda gradient: None)
    plain(loop, index)


def gradient_there(loop: Loop, index: int) -> None:
    loop.module.last.bias.grad = torch.ones(16)
    plain(loop, index)


def two_forwards(loop: Loop, index: int) -> None:
    (loop.loss() + loop.loss()).backward()
    loop.note()
    loop.step()


def only_some(loop: Loop, index: int) -> None:
    loop.backward(inputs=[loop.module.first.weight, loop.module.last.bias])
    loop.step()


def gradients_by_hand(loop: Loop, index: int) -> None:
    parameters = list(loop.module.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loop.loss(), parameters), strict=True):
        parameter.grad = gradient
    loop.note()
    loop.step()


def late_step_hook(loop: Loop, index: int) -> None:
    if index == 5:
        loop.optimizer.register_step_post_hook(lambda *_: None)
    plain(loop, index)


LATER: dict[str, tuple[Step, str]] = {
    "a hook": (after(5, late_hook), "it has gradient hooks"),
    "a step hook": (after(5, late_step_hook), "there are step hooks besides teraio's"),
    "a gradient that is there": (once(5, gradient_there), "`.grad` is not None when backward begins"),
    "a graph that is kept": (once(5, graph_kept), "backward keeps its graph"),
    "two forward passes": (once(5, two_forwards), "several forward passes used it before a step"),
    "gradients for some": (once(5, only_some), r"the pass does not fill its `.grad`"),
    "torch.autograd.grad": (once(5, gradients_by_hand), r"the pass does not fill its `.grad`"),
}


@pytest.mark.parametrize("name", LATER)
def test_in_the_way_later_on(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """That pass returns its gradients. What is over after it does not hinder the next one."""
    step, reason = LATER[name]
    with caplog.at_level(logging.WARNING, logger="teraio"):
        loop = same(step, steps=9)
    assert loop.left[4] == set() and loop.left[5] != set()
    (record,) = caplog.records
    assert re.search(reason, record.getMessage())
    assert loop.left[-1] == (ALL if name in ("a hook", "a step hook") else set())


def test_settings_that_change_before_one_step(caplog: pytest.LogCaptureFixture) -> None:
    """The update has used those of its moment; from then on the step does it."""

    def changing(loop: Loop, index: int) -> None:
        loop.backward()
        if index >= 4:
            loop.optimizer.param_groups[0]["lr"] = 0.02
        loop.step()

    with caplog.at_level(logging.WARNING, logger="teraio"):
        loop = run(changing, True)
    assert loop.left == [ALL] * 3 + [set()] * 2 + [ALL] * 2
    assert "the optimizer's settings are changed between backward and step" in caplog.text


def test_settings_that_change_after_the_step() -> None:
    def changing(loop: Loop, index: int) -> None:
        plain(loop, index)
        loop.optimizer.param_groups[0]["lr"] *= 0.9

    assert same(changing).left[-1] == set()


# -- errors: what has been updated cannot be undone


def updated(steps: int = 5) -> Loop:
    loop = run(plain, True, steps)
    assert loop.left[-1] == set()
    return loop


def test_a_second_backward_pass_before_the_step() -> None:
    loop = updated()
    loop.backward()
    before = loop.everything()[len(loop.seen) :]
    loss = loop.loss()
    with pytest.raises(teraio.UnsupportedError) as caught:
        loss.backward()
    assert str(caught.value) == (
        "parameter 'first.weight' was updated inside the backward pass, and a second backward pass wants to add to its "
        "gradient before optimizer.step(), which overlap_step cannot do; if the iteration was interrupted, end it by "
        "optimizer.step(); otherwise leave out the option overlap_step, and restart from the last checkpoint"
    )
    assert all(map(torch.equal, loop.everything()[len(loop.seen) :], before)), "nothing was changed"
    assert all(p.grad is None for p in loop.module.parameters())
    loop.step()
    plain(loop, 9)


def test_a_backward_pass_that_was_interrupted() -> None:
    """The error of the next one says how to go on."""
    loop = updated()
    loss = loop.loss()
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
        loop.loss().backward()
    loop.step()
    plain(loop, 9)


def test_passes_over_a_graph_that_was_kept() -> None:
    """The first one returns its gradients; the second, for which they were set to None, need not."""
    assert same(once(5, retained)).left[-2:] == [set()] * 2


def test_eager_code_contributes_later() -> None:
    loop = updated()
    (loop.loss() + loop.module.second.weight.square().sum()).backward()
    with pytest.raises(teraio.UnsupportedError, match="'second.weight' was .* but got another gradient after that, from outside"):
        loop.optimizer.step()


def test_another_optimizer_comes_later() -> None:
    loop = updated()
    other = torch.optim.SGD(loop.module.last.parameters(), lr=0.1)
    loop.backward()
    with pytest.raises(teraio.UnsupportedError, match=r"'last.weight' was .* but another optimizer has it as well; leave out"):
        other.step()


def test_a_gradient_scaler_later() -> None:
    loop = run(plain, True, 5, make=fused)
    scaler_of(loop).scale(loop.loss()).backward()
    with pytest.raises(teraio.UnsupportedError, match="but its gradient was scaled by a GradScaler"):
        loop.optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
        loop.optimizer.step()


# -- new graphs, parameters and optimizers


def test_a_graph_for_another_size_is_watched_first() -> None:
    def growing(loop: Loop, index: int) -> None:
        x = torch.randn(4 if index < 5 else 6, 16, generator=loop.generator)
        loop.model(x).square().mean().backward()
        loop.note()
        loop.step()

    assert same(growing, steps=8).left == [ALL] * 3 + [set()] * 2 + [ALL] + [set()] * 2


def test_parameters_that_are_added_later() -> None:
    def make(module: nn.Module) -> Optimizer:
        return torch.optim.AdamW([*module.first.parameters(), *module.last.parameters()], lr=0.01)  # type: ignore[union-attr, operator]

    def adding(loop: Loop, index: int) -> None:
        if index == 4:
            loop.optimizer.add_param_group({"params": list(loop.module.second.parameters()), "lr": 0.1})
        loop.module.second.zero_grad()
        plain(loop, index)

    second = {"second.weight", "second.bias"}
    loop = same(adding, make=make, steps=9)
    assert loop.left == [ALL] * 3 + [second] * 4 + [set()] * 2


def test_a_new_optimizer_takes_over() -> None:
    def exchanging(loop: Loop, index: int) -> None:
        if index == 5:
            loop.optimizer = torch.optim.SGD(loop.module.parameters(), lr=0.1, momentum=0.9)
        plain(loop, index)

    assert same(exchanging, steps=10).left == [ALL] * 3 + [set()] * 2 + [ALL] * 3 + [set()] * 2


def test_states_that_were_taken_away_are_made_by_the_step() -> None:
    def clearing(loop: Loop, index: int) -> None:
        if index == 5:
            loop.optimizer.state.clear()
        plain(loop, index)

    assert same(clearing, steps=8).left == [ALL] * 3 + [set()] * 2 + [ALL] + [set()] * 2
