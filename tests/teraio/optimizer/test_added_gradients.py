"""Gradients of several passes: which are added between the stages of the backward graph, and that the sums are autograd's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ..parity.harness import Run, check_exact, compiled_input_needs_grad, train
from .overlapped_loops import ALL, STEPS, Net, Step, case, penalty

pytestmark = compiled_input_needs_grad

SECOND = {"second.weight"}
ONE = {"second.weight", "second.bias"}


def watch(run: Run) -> None:
    """Note the parameters to which autograd adds a gradient, in each pass: a hook of a node tells, of which nobody knows."""
    for name, parameter in run.module.named_parameters():
        node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
        node.register_hook(lambda _, made, name=name: run.kept["passes"][-1].add(name) if made[0] is not None else None)
        run.kept[name] = node  # a parameter does not keep it alive


def passes(one: Callable[[Run, Tensor], Any] = Run.backward, then: Callable[[Run], Any] = Run.update) -> Step:
    def step(run: Run, x: Tensor, index: int) -> None:
        if index == 0:
            run.kept["passes"] = []
            watch(run)
        for number in range(3):
            run.kept["passes"].append(set())
            one(run, x + number)
        run.record_gradients()
        then(run)

    return step


def left_to_autograd(step: Step, *, broken: bool = False) -> list[set[str]]:
    """The parameters to which autograd added a gradient, by pass, after a comparison with a loop in which it adds all."""
    seen: dict[bool, list[set[str]]] = {}

    def loop(hooked: bool) -> Step:
        def act(run: Run, x: Tensor, index: int) -> None:
            for parameter in run.module.parameters() if hooked and index == 0 else ():
                parameter.register_post_accumulate_grad_hook(lambda _: None)
            step(run, x, index)
            seen[hooked] = run.kept["passes"]

        return act

    made = {hooked: train(case(loop(hooked), make_module=lambda: Net(broken))) for hooked in (True, False)}
    check_exact(made[False], made[True])
    assert seen[True][1:3] != [set(), set()], "a hook keeps gradients from being added early"
    return seen[False]


def hooked(run: Run, x: Tensor) -> None:
    if "hook" not in run.kept:
        run.kept["hook"] = run.module.second.weight.register_hook(lambda gradient: 2 * gradient)
    run.backward(x)


def clipped(run: Run, x: Tensor) -> None:
    run.backward(x)
    nn.utils.clip_grad_norm_(run.module.parameters(), 0.1)


def two_at_once(run: Run, x: Tensor) -> None:
    (run.loss(x) + run.loss(x + 1)).backward()


def two_in_the_last(run: Run, x: Tensor) -> None:
    two_at_once(run, x) if len(run.kept["passes"]) % 3 == 0 else run.backward(x)


def exchanged(run: Run, x: Tensor) -> None:
    run.backward(x)
    first, second = run.module.first.weight, run.module.second.weight
    first.grad, second.grad = second.grad, first.grad


def shared(run: Run, x: Tensor) -> None:
    run.backward(x)
    run.module.second.weight.grad = run.module.first.weight.grad


def kept_first(run: Run, x: Tensor) -> None:
    run.backward(x, retain_graph=len(run.kept["passes"]) % 3 == 1)


def retained_twice(run: Run, x: Tensor) -> None:
    loss = run.loss(x)
    loss.backward(retain_graph=True)
    loss.backward()


def by_hand_before(run: Run, x: Tensor) -> None:
    """User code computes gradients that go nowhere, and then a pass."""
    torch.autograd.grad(run.loss(x), list(run.module.parameters()))
    run.backward(x)


def zeroed(run: Run) -> None:
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=False)


# The parameters to which autograd adds in the second and the third pass of a step.
LOOPS: dict[str, tuple[Step, bool, set[str], set[str]]] = {
    "plain": (passes(), False, set(), set()),
    "only some": (passes(lambda run, x: run.backward(x, inputs=list(run.module.second.parameters()))), False, ONE, ONE),
    "gradients that go nowhere before": (passes(by_hand_before), False, set(), set()),
    "two graphs, one parameter in both": (passes(), True, {"first.weight"}, {"first.weight"}),
    "a hook": (passes(hooked), False, SECOND, SECOND),
    "a penalty of user code": (passes(lambda run, x: (run.loss(x) + penalty(run)).backward()), False, SECOND, SECOND),
    "clipped in every pass": (passes(clipped), False, ALL, ALL),
    "two forward passes at once": (passes(two_at_once), False, ALL, ALL),
    "two forward passes at once in the last": (passes(two_in_the_last), False, set(), ALL),
    "the graph is kept": (passes(lambda run, x: run.backward(x, retain_graph=True)), False, ALL, ALL),
    "gradients that are exchanged": (passes(exchanged), False, ALL, ALL),
    "one gradient of two parameters": (passes(shared), False, ALL, ALL),
    "kept in the first pass": (passes(kept_first), False, ALL, ALL),
    "the same graph twice": (passes(retained_twice), False, ALL, ALL),
}


@pytest.mark.parametrize("name", LOOPS)
def test_sums_are_those_of_autograd(name: str) -> None:
    step, broken, second, third = LOOPS[name]
    found = left_to_autograd(step, broken=broken)
    # Uses are counted from the first step on that has several passes.
    assert [tuple(found[number : number + 2]) for number in range(4, len(found), 3)] == [(second, third)] * (len(found) // 3 - 1)


def test_gradients_that_are_zeroed_are_left_to_autograd() -> None:
    """From the second step on, when they are there in the first pass."""
    assert left_to_autograd(passes(then=zeroed)) == [ALL] * 3 * STEPS
