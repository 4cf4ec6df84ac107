"""What autograd tells of the backward pass that runs now: where a compiled graph's gradients go, and what hinders an update."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Leaf(NamedTuple):
    """A leaf tensor that the node hands a gradient to, and the node `AccumulateGrad` that puts it into `.grad`."""

    parameter: Tensor
    accumulate: Any


def leaves() -> dict[int, Leaf]:
    """By the number of the edge that they hang on; none outside of a backward pass, or where there is no such node."""
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
    """Why its gradient is not only what this backward pass adds, or is wanted by others; None if neither."""
    if parameter.grad is not None:
        return (
            "its `.grad` is not None when backward begins (several backward passes before a step, or "
            "zero_grad(set_to_none=False))"
        )
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return "it has gradient hooks"
    return None


def pass_problem(found: list[Leaf]) -> str | None:
    """Why this backward pass is not one that puts gradients into `.grad` of all these once and for all; None if it is."""
    if torch._C._autograd._get_current_graph_task_keep_graph():
        return "backward keeps its graph (retain_graph or create_graph)"
    try:
        executed = all(torch._C._will_engine_execute_node(leaf.accumulate) for leaf in found)
    except RuntimeError:  # so says PyTorch of leaves under autograd.grad
        executed = False
    return None if executed else "the pass does not fill its `.grad` (torch.autograd.grad, or backward with inputs)"
