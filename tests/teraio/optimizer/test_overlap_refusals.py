"""What stands in the way of updates inside the backward pass: named in the log, and then everything is as without the option.

Also what comes when parameters are updated there already, and what comes too late.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import teraio

from ...training import compiled
from ..parity.harness import Result, Run, compiled_input_needs_grad, one_update, train
from ..parity.loops import with_closure
from .overlapped_loops import (
    ALL,
    OVERLAPPED,
    STEPS,
    Net,
    Step,
    before,
    between,
    case,
    fused,
    graph_kept,
    once,
    passing,
    penalty,
    retained,
    same,
    scaler_of,
)

pytestmark = compiled_input_needs_grad


def said(caplog: pytest.LogCaptureFixture, step: Step = one_update, **settings: Any) -> tuple[Result, str]:
    """What `same` returns, and the one warning. PyTorch logs for debugging when it compiles for the first time."""
    with caplog.at_level(logging.WARNING, logger="teraio"):
        result = same(step, **settings)
    (record,) = caplog.records
    return result, record.getMessage()


def clamp_data(run: Run, index: int) -> None:
    for parameter in run.module.parameters():
        parameter.grad.data.clamp_(-1e-3, 1e-3)


# -- for all parameters


def scaled(run: Run, x: Tensor, index: int) -> None:
    scaler_of(run).scale(run.loss(x)).backward()
    run.note_left()
    scaler_of(run).step(run.optimizer)
    scaler_of(run).update()
    run.optimizer.zero_grad()


def zeroed_in_place(run: Run, x: Tensor, index: int) -> None:
    run.backward(x)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=False)


def set_rate(run: Run, index: int) -> None:
    run.optimizer.param_groups[0]["lr"] = 0.01 / (index + 1)


def evaluate(run: Run, index: int) -> None:
    with torch.no_grad():
        run.record("evaluated", run.model(torch.ones(2, 16)))


def replace_memory(run: Run, index: int) -> None:
    for parameter in run.module.parameters():
        parameter.data = parameter.data.clone()


def penalise_all(run: Run, x: Tensor) -> None:
    (run.loss(x) + sum(p.square().sum() for p in run.module.parameters())).backward()


def from_elsewhere(run: Run, x: Tensor) -> None:
    """The graph's inputs are computed from the parameters: what it returns are no gradients of leaves."""
    computed = {name: 2 * p for name, p in run.module.named_parameters()}
    model = run.kept.setdefault("model", compiled(functional, run.options or {}))
    model(run.module, computed, x).square().mean().backward()


def functional(module: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    result: Tensor = torch.func.functional_call(module, parameters, (x,))
    return result


class Own(torch.optim.AdamW):
    """Of the user's, who may do as he likes."""


CHANGED = "gradients are changed between backward and step"
OTHERS = "others contribute to its gradient"
REFUSED: dict[str, tuple[Any, ...]] = {
    "own optimizer": (one_update, "Own is updated as a whole", lambda module: Own(module.parameters())),
    # To a norm that no gradient reaches: one day one may.
    "clip_grad_norm_ in vain": (between(lambda run, _: nn.utils.clip_grad_norm_(run.module.parameters(), 1e9)), CHANGED),
    "clamped through data": (between(clamp_data), CHANGED),
    "GradScaler": (scaled, CHANGED + r" \(clipping, or a GradScaler\)"),
    "GradScaler, fused": (scaled, "a GradScaler drives the optimizer", fused),
    "accumulation": (
        passing(lambda run, x: (run.backward(x), run.backward(x))),
        "several backward passes, or several graphs, contribute to its gradient",
    ),
    "zero_grad(set_to_none=False)": (zeroed_in_place, r"`.grad` is not None when backward begins .*set_to_none=False"),
    "two passes over one graph": (passing(retained), "several backward passes"),
    "retain_graph": (graph_kept, "backward keeps its graph"),
    "eager code contributes": (passing(penalise_all), OTHERS),
    "other settings": (between(set_rate), "settings are changed between backward and step"),
    "evaluation before the step": (between(evaluate), "another compiled graph reads it between"),
    "activation checkpointing": (
        passing(lambda run, x: checkpoint(run.model, x, use_reentrant=False).square().mean().backward()),
        "several forward passes used it before a step",
    ),
    "new memory": (between(replace_memory), "its memory was replaced between backward and step"),
    "no leaf": (passing(from_elsewhere), "does not come from a compiled graph that it is an input of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name: str, caplog: pytest.LogCaptureFixture) -> None:
    step, reason, *make = REFUSED[name]
    result, message = said(caplog, step, **({"make": make[0]} if make else {}))
    assert result.left == [ALL] * len(result.left) and len(result.left) >= STEPS
    assert re.search(reason, message), message


@pytest.mark.parametrize("step", [one_update, with_closure])
def test_nothing_in_the_way(step: Step, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="teraio"):
        assert same(step).left == [ALL] * 3 + [set()] * (STEPS - 3)
    assert not caplog.records


# -- for some parameters only


def hook_on(register: Callable[[nn.Parameter], Any]) -> Step:
    def step(run: Run, x: Tensor, index: int) -> None:
        if index == 0:
            register(run.module.second.weight)
        one_update(run, x, index)

    return step


def two_optimizers(run: Run, index: int) -> None:
    run.kept.setdefault("other", torch.optim.SGD([run.module.last.bias], lr=0.1)).step()


SECOND, HOOKS = "second.weight", "'second.weight', not the backward pass: it has gradient hooks"
FOR_SOME: dict[str, tuple[Step, str, str]] = {
    "a tensor hook": (hook_on(lambda p: p.register_hook(lambda _: None)), SECOND, HOOKS),
    "a hook on the gradient": (hook_on(lambda p: p.register_post_accumulate_grad_hook(lambda _: None)), SECOND, HOOKS),
    # Before and after a graph break; all others are updated in the graph that they belong to.
    "two graphs": (one_update, "first.weight", "'first.weight'.*several graphs"),
    "several optimizers": (
        between(two_optimizers),
        "last.bias",
        "'last.bias', not the backward pass: several optimizers have it",
    ),
    "a penalty": (passing(lambda run, x: (run.loss(x) + penalty(run)).backward()), SECOND, f"{OTHERS}|gradients are changed"),
}


@pytest.mark.parametrize("name", FOR_SOME)
def test_refused_for_one_parameter(name: str, caplog: pytest.LogCaptureFixture) -> None:
    step, refused, reason = FOR_SOME[name]
    result, message = said(caplog, step, make_module=lambda: Net(broken=name == "two graphs"))
    assert result.left[3:] == [{refused}] * (STEPS - 3)
    assert re.search(f"overlap_step: optimizer.step\\(\\) updates .*({reason})", message), message


def test_sparse_gradients(caplog: pytest.LogCaptureFixture) -> None:
    """They come from eager code: PyTorch compiles no graph that has them."""

    def sparse(run: Run, x: Tensor, index: int) -> None:
        if index == 0:
            embedding = run.kept["embedding"] = nn.Embedding(8, 16, sparse=True)
            run.optimizer.add_param_group({"params": [embedding.weight]})
        run.model(run.kept["embedding"](torch.tensor([index % 8, 3]))).square().sum().backward()
        run.note_left()
        run.update()

    result, message = said(caplog, sparse, make=lambda module: torch.optim.SGD(module.parameters(), lr=0.01))
    assert result.left[3:] == [set()] * (STEPS - 3)
    assert "its gradient does not come from a compiled graph" in message


@pytest.mark.parametrize("chosen", [False, True])
def test_with_the_option_optimizer_off(chosen: bool, caplog: pytest.LogCaptureFixture) -> None:
    def step(run: Run, x: Tensor, index: int) -> None:
        if index == 1 and chosen:
            teraio.manage_optimizer(run.optimizer)
        one_update(run, x, index)

    result = train(case(step), options={**OVERLAPPED, "optimizer": "off"})
    assert result.left[-1] == (set() if chosen else ALL)
    assert ("give the optimizer to teraio.manage_optimizer" in caplog.text) != chosen


# -- in the way later on, when parameters are updated inside the backward pass already


def set_gradient(run: Run) -> None:
    run.module.last.bias.grad = torch.ones(16)


def only_some(run: Run, x: Tensor) -> None:
    run.loss(x).backward(inputs=[run.module.first.weight, run.module.last.bias])


LATER: dict[str, tuple[Step, str]] = {
    "a hook": (before(lambda run: run.module.second.weight.register_hook(lambda _: None)), "it has gradient hooks"),
    "a step hook": (
        before(lambda run: run.optimizer.register_step_post_hook(lambda *_: None)),
        "there are step hooks besides teraio's",
    ),
    "a gradient that is there": (before(set_gradient), "`.grad` is not None when backward begins"),
    "a graph that is kept": (once(graph_kept), "backward keeps its graph"),
    "two forward passes": (
        once(passing(lambda run, x: (run.loss(x) + run.loss(x)).backward())),
        "several forward passes used it before a step",
    ),
    "gradients for some": (once(passing(only_some)), r"the pass does not fill its `.grad`"),
}


@pytest.mark.parametrize("name", LATER)
def test_in_the_way_later_on(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """That pass returns its gradients. What is over after it does not hinder the next one."""
    step, reason = LATER[name]
    result, message = said(caplog, step, steps=9)
    assert result.left[4] == set() and result.left[5] != set()
    assert re.search(reason, message)
    assert result.left[-1] == (ALL if name in ("a hook", "a step hook") else set())


def test_settings_that_change_too_late_for_one_update(caplog: pytest.LogCaptureFixture) -> None:
    result = train(case(once(between(set_rate)), steps=9), options=OVERLAPPED)
    assert result.left[5] == set() and result.left[-1] == ALL
    assert "settings are changed between backward and step" in caplog.text
