"""Prepares a graph for its cuts: adds what PyTorch leaves out, and lets fewer values cross from one stage to another."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from teraio.stages.operators import (
    FUNCTIONAL_COLLECTIVES,
    SAVES_STATE,
    carries_random_state,
    is_getitem,
    is_launch,
    is_read_off,
    is_wait,
    unwrapped,
)


def prepare(graph: Graph) -> None:
    """Make a graph ready to be cut. Changes `graph`; what it computes stays the same."""
    describe(graph)
    compute_sizes(graph)
    wait_for_all(graph)


def describe(graph: Graph) -> None:
    """Give the operators with random state in `graph` what PyTorch leaves out: fake results and the module they come from.

    A random state has a fixed size. PyTorch gives it a symbolic one, which would keep equal layers from sharing a stage.
    """
    for node in graph.nodes:
        if node.op == "placeholder" and node.name.startswith("rng_state_output"):
            node.meta["val"] = _of_fixed_size(node.meta["val"])
        if not carries_random_state(node):
            continue
        states = [user for user in node.users if node.target is SAVES_STATE and user.args[1] == 0]
        for state in states:
            state.meta["val"] = _of_fixed_size(state.meta["val"])
        if node.meta.get("val") is None:
            result = _run(node)
            node.meta["val"] = (states[0].meta["val"] if states else None, result) if node.target is SAVES_STATE else result
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


def _run(node: Node) -> Any:
    """Return the fake result of the operator inside `node`."""
    operator, args, kwargs = torch.fx.node.map_arg(unwrapped(node), lambda source: source.meta.get("val"))
    mode = detect_fake_mode((args, kwargs))
    with mode if mode is not None else torch.no_grad():
        return operator(*args, **kwargs)


def compute_sizes(graph: Graph) -> None:
    """Compute the sizes that a graph reads off its tensors, as batch norm does, from the sizes among its inputs instead.

    Otherwise a stage could need a large tensor only to ask for its size, and no cut could separate the two. Changes `graph`.
    """
    known: dict[sympy.Expr, Node] = {}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt):
            continue
        if node.op == "placeholder":
            known.setdefault(value.node.expr, node)
        elif is_read_off(node) and value.node.expr.free_symbols <= known.keys():
            node.replace_all_uses_with(_computed(graph, node, known))
            graph.erase_node(node)


def _computed(graph: Graph, node: Node, known: dict[sympy.Expr, Node]) -> Node:
    """Return a node with the size of `node`, made before it. known: inputs of the graph and sizes made before."""
    expression = node.meta["val"].node.expr
    if expression not in known:
        before = set(graph.nodes)
        tracer = GraphAppendingTracer(graph)
        with graph.inserting_before(node):
            symbols = {symbol: Proxy(known[symbol], tracer) for symbol in expression.free_symbols}
            known[expression] = sympy_interp(PythonReferenceAnalysis, symbols, expression).node
        for made in graph.nodes:
            if made not in before:
                target: Any = made.target
                made.meta["val"] = target(*torch.fx.node.map_arg(made.args, lambda each: each.meta["val"]))
    return known[expression]


def wait_for_all(graph: Graph) -> None:
    """Have each collective of the graph waited for that is not. To wait twice does no harm. Changes `graph`."""
    for node in list(graph.nodes):
        if not (is_launch(node) and node.target.namespace in FUNCTIONAL_COLLECTIVES):
            continue
        results = [user for user in node.users if is_getitem(user)] or [node]
        for result in results:
            if isinstance(result.meta.get("val"), torch.Tensor) and not any(is_wait(user) for user in result.users):
                with graph.inserting_after(results[-1]):
                    wait = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (result,))
                wait.meta = dict(result.meta)
