"""Operators that carry random state, so that a checkpointed region draws the same numbers when backward recomputes it.

PyTorch wraps a random operator, such as attention or dropout, in one of three higher-order operators:
`run_and_save_rng_state(operator, ...)` returns the state and the operator's result, `run_with_rng_state(state, operator, ...)`
and `graphsafe_run_with_rng_state(operator, ..., rng_state=generator)` return the operator's result. A graph is cut around them as
around any operator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._prims import rng_prims
from torch.fx import Graph, Node

_SAVES = rng_prims.run_and_save_rng_state
_TAKES = rng_prims.run_with_rng_state
_GRAPH_SAFE = rng_prims.graphsafe_run_with_rng_state


def carries_random_state(node: Node) -> bool:
    """Return whether `node` wraps an operator to save its random state or to run with a given one."""
    return any(node.target is wrapper for wrapper in (_SAVES, _TAKES, _GRAPH_SAFE))


def unwrapped(node: Node) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """Return the operator that `node` runs, and its arguments: of a node with random state those of the operator inside."""
    if node.target is _SAVES:
        return node.args[0], node.args[1:], node.kwargs
    if node.target is _TAKES:
        return node.args[1], node.args[2:], node.kwargs
    if node.target is _GRAPH_SAFE:
        return node.args[0], node.args[1:], {name: value for name, value in node.kwargs.items() if name != "rng_state"}
    return node.target, node.args, node.kwargs


def describe(graph: Graph) -> None:
    """Give the operators with random state in `graph` what PyTorch leaves out: fake results and the module they come from.

    A random state has a fixed size. PyTorch gives it a symbolic one, which would keep equal layers from sharing a stage.
    """
    for node in graph.nodes:
        if node.op == "placeholder" and node.name.startswith("rng_state_output"):
            node.meta["val"] = _of_fixed_size(node.meta["val"])
        if not carries_random_state(node):
            continue
        for user in node.users:
            if node.target is _SAVES and user.args[1] == 0:
                user.meta["val"] = _of_fixed_size(user.meta["val"])
        if node.meta.get("val") is None:
            node.meta["val"] = _result(node)
        for near in (*node.users, *node.all_input_nodes):
            for key in ("nn_module_stack", "fwd_nn_module_stack"):
                if key in near.meta:
                    node.meta.setdefault(key, near.meta[key])


def _of_fixed_size(state: torch.Tensor) -> torch.Tensor:
    (size,) = state.shape
    if isinstance(size, int):
        return state
    mode = detect_fake_mode(state)
    with mode if mode is not None else torch.no_grad():
        return torch.empty(int(size.node.hint), dtype=state.dtype, device=state.device)


def _result(node: Node) -> Any:
    """Return the fake result of `node`."""
    operator, args, kwargs = torch.fx.node.map_arg(unwrapped(node), lambda source: source.meta.get("val"))
    states = [user.meta["val"] for user in node.users if node.target is _SAVES and user.args[1] == 0]
    mode = detect_fake_mode((args, kwargs))
    with mode if mode is not None else torch.no_grad():
        made = operator(*args, **kwargs)
    return (next(iter(states), None), made) if node.target is _SAVES else made
