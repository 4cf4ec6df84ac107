"""The symbolic sizes of a graph: they are computed from those among its inputs, wherever an operator needs one."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch._guards import TracingContext
from torch.fx import Graph, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from teraio.stages.operators import is_read_off


class Sizes:
    """The nodes of a graph that have symbolic sizes. Sizes that are not there are made from those of the inputs."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._known: dict[sympy.Expr, Node] = {}
        for node in graph.find_nodes(op="placeholder"):
            if isinstance(node.meta.get("val"), torch.SymInt):
                self._known.setdefault(node.meta["val"].node.expr, node)

    def has(self, expression: sympy.Expr) -> bool:
        """Return whether a size can be made."""
        return bool(expression.free_symbols <= self._known.keys())

    def node(self, expression: sympy.Expr, before: Node) -> Node:
        """Return a node with a size, which is made `before` another one if it is not yet known: each next one further on."""
        if expression not in self._known:
            made = before.prev
            tracer = GraphAppendingTracer(self._graph)
            with self._graph.inserting_before(before):
                symbols = {symbol: Proxy(self._known[symbol], tracer) for symbol in expression.free_symbols}
                self._known[expression] = sympy_interp(PythonReferenceAnalysis, symbols, expression).node
            while (made := made.next) is not before:
                target: Any = made.target
                made.meta["val"] = target(*torch.fx.node.map_arg(made.args, lambda each: each.meta["val"]))
        return self._known[expression]


def compute_sizes(graph: Graph) -> None:
    """Compute the sizes that a graph reads off its tensors, as batch norm does, from the sizes among its inputs instead.

    Otherwise a stage could need a large tensor only to ask for its size, and no cut could separate the two. Changes `graph`.
    """
    sizes = Sizes(graph)
    for node in list(graph.nodes):
        if is_read_off(node) and sizes.has(node.meta["val"].node.expr):
            node.replace_all_uses_with(sizes.node(node.meta["val"].node.expr, node))
            graph.erase_node(node)


def sizes_are_promised() -> bool:
    """Return whether the user has said which sizes the graph that is compiled takes (`mark_dynamic` with `min` or `max`).

    PyTorch refuses to compile what then takes only some of them.
    """
    context = TracingContext.try_get()
    known = () if context is None else context.tensor_to_context.values()  # type: ignore[no-untyped-call]
    return any(hasattr(limit, "vr") for each in known for limit in getattr(each, "constraint_sizes", ()))
