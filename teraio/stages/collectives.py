"""Collectives that are operators of a graph: where each of them begins, and where its result is waited for.

[Note: Collectives]
From its launch to the operator that waits for it, a collective reads and writes its tensors while the graph goes on. And all
ranks must launch the same collectives in the same order, although their sizes may differ. So:
* A launch stays where the graph has it. Nothing that depends on sizes moves it past another one.
* It is waited for in the stage that launches it. No block is paged, moved or freed while a collective works on it, because stages
  hold what they read and make until they have ended.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from teraio.stages import cost

_FUNCTIONAL = frozenset(("_c10d_functional", "_c10d_functional_autograd"))
_NAMESPACES = _FUNCTIONAL | {"_dtensor", "c10d_functional", "symm_mem"}
_WAIT = "wait_tensor"


def is_wait(node: Node) -> bool:
    """Return whether `node` waits for the result of a collective, which it returns."""
    return _is_distributed(node) and cost.packet_name(node) == _WAIT


def is_launch(node: Node) -> bool:
    """Return whether `node` begins a collective."""
    return _is_distributed(node) and cost.packet_name(node) != _WAIT and _has_tensors(node)


def has_collectives(graph: Graph) -> bool:
    """Return whether the graph begins collectives, or waits for some."""
    return any(is_wait(node) or is_launch(node) for node in graph.nodes)


def launch_of(wait: Node) -> Node:
    """Return the node whose results `wait` waits for: the one that begins the collective, or an input of the graph."""
    source = wait.all_input_nodes[0]
    while not is_launch(source) and source.op == "call_function" and source.all_input_nodes:
        source = source.all_input_nodes[0]
    return source


def wait_for_all(graph: Graph) -> None:
    """Have each collective of the graph waited for that is not. To wait twice does no harm. Changes `graph`."""
    for node in [n for n in graph.nodes if is_launch(n) and _is_distributed(n, _FUNCTIONAL)]:
        results = [user for user in node.users if cost.is_getitem(user)] or [node]
        for result in results:
            if isinstance(result.meta.get("val"), torch.Tensor) and not any(is_wait(user) for user in result.users):
                with graph.inserting_after(results[-1]):
                    wait = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (result,))
                wait.meta = dict(result.meta)


def _is_distributed(node: Node, namespaces: frozenset[str] = _NAMESPACES) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in namespaces


def _has_tensors(node: Node) -> bool:
    """A mesh's process group is no tensor."""
    return next(cost.fake_tensors(node.meta.get("val")), None) is not None
