"""Asks autograd about the backward pass that runs now: where a compiled graph's gradients go, and what forbids an update."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Leaf(NamedTuple):
    """A leaf tensor that gets a gradient from the running node, and the node `AccumulateGrad` that puts it into `.grad`."""

    parameter: Tensor
    accumulate: Any


def leaves() -> dict[int, Leaf]:
    """Return the leaves by the number of their edge. Empty outside of a backward pass, and for a node without leaves."""
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return {}
    functions = [function for function, _ in node.next_functions]
    return {
        edge: Leaf(function.variable, function)
        for edge, function in enumerate(functions)
        if type(function).__name__ == "AccumulateGrad"
    }


def leaf_problem(parameter: Tensor) -> str | None:
    """Return why others than this backward pass add to the parameter's gradient or use it; None if nobody does."""
    if parameter.grad is not None:
        return (
            "its `.grad` is not None when backward begins (several backward passes before a step, or "
            "zero_grad(set_to_none=False))"
        )
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return "it has gradient hooks"
    return None


def pass_problem(found: list[Leaf]) -> str | None:
    """Return why this backward pass does not put a final gradient into `.grad` of all these leaves; None if it does."""
    if torch._C._autograd._get_current_graph_task_keep_graph():
        return "backward keeps its graph (retain_graph or create_graph)"
    try:
        executed = all(torch._C._will_engine_execute_node(leaf.accumulate) for leaf in found)
    except RuntimeError:  # PyTorch raises it for leaves under autograd.grad
        executed = False
    return None if executed else "the pass does not fill its `.grad` (torch.autograd.grad, or backward with inputs)"
