"""Sizes that a graph reads off its tensors are computed from the sizes among its inputs instead, as those of batch norm.

Otherwise a stage could need a large tensor only to ask for its size, and no cut could separate the two.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx import Graph, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from teraio.stages import cost


def is_read_off(node: Node) -> bool:
    """Return whether `node` takes a symbolic size from a tensor."""
    return cost.is_size(node) and any(isinstance(n.meta.get("val"), torch.Tensor) for n in node.all_input_nodes)


def compute_sizes(graph: Graph) -> None:
    """Replace each symbolic size that is read off a tensor, as far as the graph's inputs tell it. Changes `graph`."""
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
                made.meta["val"] = _value(made)
    return known[expression]


def _value(node: Node) -> Any:
    arguments = torch.fx.node.map_arg(node.args, lambda each: each.meta["val"])
    target: Any = node.target
    return target(*arguments)
