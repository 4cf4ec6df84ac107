"""What stands in the way of updates inside the backward pass: named in the log, and then everything is as without the option."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import teraio

from ....training import compiled
from .loops import (
    ALL,
    STEPS,
    Loop,
    Net,
    Own,
    Step,
    accumulated,
    checkpointed,
    clipped_data,
    clipped_in_vain,
    clipped_norm,
    clipped_value,
    closure,
    from_elsewhere,
    fused,
    graph_kept,
    hooked_step,
    looked_at_before_each_step,
    new_memory_before_each_step,
    new_rate_before_each_step,
    penalised,
    plain,
    retained,
    run,
    same,
    scaled,
    zeroed_in_place,
)

# Dynamo looks at it where what eager code or another graph has made enters a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")


@pytest.mark.parametrize("step", [plain, closure])
def test_nothing_in_the_way(step: Step, caplog: pytest.LogCaptureFixture) -> None:
    """After the optimizer's first step and two more, no gradient outlives the backward pass."""
    with caplog.at_level(logging.WARNING, logger="teraio"):
        loop = same(step)
    assert loop.left == [ALL] * 3 + [set()] * (STEPS - 3)
    assert not caplog.records


REFUSED: dict[str, tuple[Step, str, dict[str, Any]]] = {
    "step hooks": (hooked_step, "AdamW is updated as a whole: there are step hooks besides teraio's", {}),
    "own optimizer": (plain, "Own is updated as a whole", {"make": lambda module: Own(module.parameters())}),
    "clip_grad_norm_": (clipped_norm, r"gradients are changed between backward and step \(clipping", {}),
    "clip_grad_norm_ in vain": (clipped_in_vain, "gradients are changed between backward and step", {}),
    "clip_grad_value_": (clipped_value, "gradients are changed between backward and step", {}),
    "clamped through data": (clipped_data, "gradients are changed between backward and step", {}),
    "GradScaler": (scaled, r"gradients are changed between backward and step \(clipping, or a GradScaler\)", {}),
    "GradScaler, fused": (scaled, "a GradScaler drives the optimizer", {"make": fused}),
    "accumulation": (accumulated, "several backward passes, or several graphs, contribute to its gradient", {}),
    "zero_grad(set_to_none=False)": (zeroed_in_place, r"`.grad` is not None when backward begins .*set_to_none=False", {}),
    "two passes over one graph": (retained, "several backward passes", {}),
    "retain_graph": (graph_kept, "backward keeps its graph", {}),
    "eager code contributes": (penalised, "others contribute to its gradient", {}),
    "other settings": (new_rate_before_each_step, "settings are changed between backward and step", {}),
    "evaluation before the step": (looked_at_before_each_step, "another compiled graph reads it between", {}),
    "activation checkpointing": (checkpointed, "several forward passes used it before a step", {}),
    "new memory": (new_memory_before_each_step, "its memory was replaced between backward and step", {}),
    "no leaf": (from_elsewhere, "does not come from a compiled graph that it is an input of", {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name: str, caplog: pytest.LogCaptureFixture) -> None:
    step, reason, settings = REFUSED[name]
    with caplog.at_level(logging.WARNING, logger="teraio"):
        loop = same(step, **settings)
    assert loop.left == [ALL] * len(loop.left) and len(loop.left) >= STEPS
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert re.search(reason, said[0]), said


# -- refused for some parameters only


def tensor_hook(parameter: nn.Parameter) -> None:
    parameter.register_hook(lambda gradient: None)


def accumulated_hook(parameter: nn.Parameter) -> None:
    parameter.register_post_accumulate_grad_hook(lambda parameter: None)


@pytest.mark.parametrize("register", [tensor_hook, accumulated_hook])
def test_gradient_hooks(register: Callable[[nn.Parameter], None], caplog: pytest.LogCaptureFixture) -> None:
    def hooked(loop: Loop, index: int) -> None:
        if index == 0:
            register(loop.module.second.weight)
        plain(loop, index)

    with caplog.at_level(logging.WARNING, logger="teraio"):
        assert same(hooked).left[3:] == [{"second.weight"}] * (STEPS - 3)
    (record,) = caplog.records
    assert record.getMessage() == (
        "overlap_step: optimizer.step() updates 'second.weight', not the backward pass: it has gradient hooks"
    )


def test_a_parameter_of_two_graphs(caplog: pytest.LogCaptureFixture) -> None:
    """Before and after a graph break; all others are updated in the graph that they belong to."""
    with caplog.at_level(logging.WARNING, logger="teraio"):
        assert same(plain, make_module=lambda: Net(broken=True)).left[3:] == [{"first.weight"}] * (STEPS - 3)
    (record,) = caplog.records
    assert "'first.weight'" in record.getMessage() and "several graphs" in record.getMessage()


def test_several_optimizers_over_one_parameter(caplog: pytest.LogCaptureFixture) -> None:
    def twice(loop: Loop, index: int) -> None:
        other = loop.kept.setdefault("other", torch.optim.SGD([loop.module.last.bias], lr=0.1))
        loop.backward()
        other.step()
        loop.step()

    with caplog.at_level(logging.WARNING, logger="teraio"):
        assert same(twice).left[3:] == [{"last.bias"}] * (STEPS - 3)
    assert "'last.bias', not the backward pass: several optimizers have it" in caplog.text


def test_a_penalty_on_one_parameter(caplog: pytest.LogCaptureFixture) -> None:
    def penalised_one(loop: Loop, index: int) -> None:
        (loop.loss() + loop.module.second.weight.square().sum()).backward()
        loop.note()
        loop.step()

    with caplog.at_level(logging.WARNING, logger="teraio"):
        assert same(penalised_one).left[3:] == [{"second.weight"}] * (STEPS - 3)
    assert "others contribute to its gradient" in caplog.text or "gradients are changed" in caplog.text


def test_sparse_gradients(caplog: pytest.LogCaptureFixture) -> None:
    """They come from eager code: PyTorch compiles no graph that has them."""

    def sparse(loop: Loop, index: int) -> None:
        if index == 0:
            embedding = loop.kept["embedding"] = nn.Embedding(8, 16, sparse=True)
            loop.optimizer.add_param_group({"params": [embedding.weight]})
        x = loop.kept["embedding"](torch.tensor([index % 8, 3]))
        (loop.model(x)).square().sum().backward()
        loop.note()
        loop.step()

    with caplog.at_level(logging.WARNING, logger="teraio"):
        loop = same(sparse, make=lambda module: torch.optim.SGD(module.parameters(), lr=0.01))
    assert loop.left[3:] == [set()] * (STEPS - 3)
    assert "its gradient does not come from a compiled graph" in caplog.text


@pytest.mark.parametrize("chosen", [False, True])
def test_with_the_option_optimizer_off(chosen: bool, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(overlap=True)
    loop.model = compiled(loop.module, {**loop.options, "optimizer": "off"})
    if chosen:
        teraio.manage_optimizer(loop.optimizer)
    with caplog.at_level(logging.WARNING, logger="teraio"):
        for index in range(STEPS):
            plain(loop, index)
    assert loop.left[-1] == (set() if chosen else ALL)
    assert ("give the optimizer to teraio.manage_optimizer" in caplog.text) != chosen
    assert all(map(torch.equal, loop.everything(), run(plain, False).everything()))
