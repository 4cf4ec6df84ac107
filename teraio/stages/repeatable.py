"""Which forward stages may run again in the backward pass, so that their results are recomputed instead of kept.

[Note: What may run again]
A stage may run again if that gives the same bits and changes nothing else:
* It writes nothing in place, and reads nothing that the graph writes. A counter of batch norm has moved on by then.
* It reads no result that user code can reach: user code may have changed it by then. What user code can change of the inputs of
  the graph is checked when the stage runs again.
* It draws no random numbers. Dropout of Inductor draws its seeds in a stage of its own; the stages that make numbers of these
  seeds are exact, because the seeds are kept. Stages that run operator by operator (`codegen="eager"`) ignore the seeds.
* All its operators belong to PyTorch. A custom operator may keep a state that nobody knows of.
It is judged before it is compiled, because that rewrites its graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import torch
from torch.fx import Node

from teraio.stages.operators import (
    carries_random_state,
    draws,
    draws_seeds,
    fake_tensors,
    is_getitem,
    is_size,
    packet_name,
    uses_seed,
)
from teraio.stages.split import Subgraph

_PURE_NAMESPACES = frozenset(("aten", "prims"))


def reasons_against(
    subgraphs: Sequence[Subgraph],
    *,
    visible: Collection[Node],
    written: Collection[Node],
    keeps_seeds: bool,
    names: Mapping[Node, str] = MappingProxyType({}),
) -> list[str]:
    """Return for each stage of a forward graph why it may not run again, in plain words; "" if it may.

    visible: results of the graph that user code can reach. written: inputs that PyTorch changes after the graph.
    keeps_seeds: the compiled stages take random numbers from their seeds. names: of the graph's inputs, for people.
    """
    changed = _storages([*written, *(node for subgraph in subgraphs for node in subgraph.mutated)])
    shown = _storages(visible)
    return [_reason(subgraph, changed, shown, keeps_seeds, names) for subgraph in subgraphs]


def _reason(subgraph: Subgraph, changed: set[int], shown: set[int], keeps_seeds: bool, names: Mapping[Node, str]) -> str:
    if subgraph.mutated:
        first = subgraph.mutated[0]
        return f"it writes {names.get(first, first.name)} in place"
    for node in subgraph.inputs:
        if _storages([node]) & changed:
            return f"it reads {names.get(node, node.name)}, which the graph changes"
        if _storages([node]) & shown:
            return f"it reads {node.name}, a result that user code can change"
    return _reason_of_operators(subgraph, keeps_seeds)


def is_repeatable(subgraph: Subgraph, *, keeps_seeds: bool) -> bool:
    """Return whether a stage of any graph may run once more, right after one that failed. keeps_seeds: see `reasons_against`."""
    return not subgraph.mutated and not _reason_of_operators(subgraph, keeps_seeds)


def _reason_of_operators(subgraph: Subgraph, keeps_seeds: bool) -> str:
    found = (_reason_of_operator(node, keeps_seeds) for node in subgraph.module.graph.nodes if node.op == "call_function")
    return next(filter(None, found), "")


def _reason_of_operator(node: Node, keeps_seeds: bool) -> str:
    if is_size(node) or is_getitem(node):
        return ""
    if carries_random_state(node):
        return "it has an operator that carries random state"
    if not isinstance(node.target, torch._ops.OpOverload):
        return f"it has the operator {node.target}, which may do more than its result shows"
    if node.target.namespace not in _PURE_NAMESPACES:
        return f"it has the custom operator {node.target}, which may do more than its result shows"
    if draws_seeds(node):
        return "it draws the seeds of random numbers"
    if uses_seed(node):
        return "" if keeps_seeds else "it draws random numbers, and codegen='eager' keeps no seeds of them"
    if draws(node):
        return f"it draws random numbers ({packet_name(node)})"
    return ""


def _storages(nodes: Collection[Node]) -> set[int]:
    return {tensor.untyped_storage()._cdata for node in nodes for tensor in fake_tensors(node.meta.get("val"))}
