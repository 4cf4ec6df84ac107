"""How many bytes a stage reads, creates and needs beside them: estimated from fake tensors, for the sizes of one call."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from runtime.device import MIN_MOVED_BYTES
from runtime.execution import Program
from teraio.stages import cost
from teraio.stages.split import Subgraph


def stage_bytes(subgraph: Subgraph, symbols: cost.Symbols) -> dict[str, int]:
    """Return the byte counts of the stage, by their names in `Stage`. Where a symbol is missing, its hint stands in."""
    return {
        "input_bytes": distinct_bytes(subgraph.inputs, symbols),
        "output_bytes": _new_bytes(subgraph, symbols),
        "workspace_bytes": _workspace_bytes(subgraph, symbols),
    }


def is_symbolic(placeholders: Sequence[Node]) -> bool:
    """Return whether one of the nodes is, or has, a symbolic size."""
    for node in placeholders:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        if any(isinstance(size, torch.SymInt) for size in sizes):
            return True
    return False


class Resizer:
    """Gives a program with symbolic sizes the byte counts of one call's arguments. Keeps the result for each set of sizes."""

    def __init__(self, placeholders: list[Node], subgraphs: list[Subgraph]) -> None:
        self._placeholders = placeholders
        self._subgraphs = subgraphs
        self._known: dict[tuple[int, ...], Program] = {}

    def __call__(self, program: Program, arguments: Sequence[Any]) -> Program:
        symbols = cost.symbol_values(self._placeholders, arguments)
        key = tuple(symbols.values())
        if key not in self._known:
            stages = tuple(
                replace(stage, **cast(Any, stage_bytes(subgraph, symbols)))
                for stage, subgraph in zip(program.stages, self._subgraphs, strict=True)
            )
            self._known[key] = replace(program, identity=(program.identity, key), stages=stages)
        return self._known[key]


def distinct_bytes(nodes: Sequence[Node], symbols: cost.Symbols) -> int:
    """Return the bytes of the storages of `nodes`. A storage that several nodes share counts once."""
    storages: dict[int, int] = {}
    for node in nodes:
        value = node.meta.get("val")
        if cost.has_storage(value):
            key = value.untyped_storage()._cdata
            storages[key] = max(storages.get(key, 0), cost.storage_bytes(value, symbols))
    return sum(storages.values())


def small(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes whose results are too small to move."""
    return [n for n in nodes if cost.output_bytes(n) < MIN_MOVED_BYTES]


_StorageKey = tuple[Node, tuple[Any, ...]]
"""The node that owns a storage, and which of its results: the indices that lead to it, as results may be nested."""


def _storages(module: GraphModule) -> dict[Node, _StorageKey]:
    """Return, for every node of a subgraph, the storage that its result lies in."""
    keys: dict[Node, _StorageKey] = {}
    for node in module.graph.nodes:
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        if source is None or not (cost.is_view(node) or cost.is_getitem(node)) or source.meta.get("val") is None:
            keys[node] = (node, ())
        elif cost.is_view(node) or not isinstance(_at(keys[source]), (tuple, list)):
            keys[node] = keys[source]
        else:
            keys[node] = (keys[source][0], (*keys[source][1], node.args[1]))
    return keys


def _at(key: _StorageKey) -> Any:
    """Return the fake value that lies there: a tensor, or several."""
    owner, path = key
    value: Any = owner.meta.get("val")
    for index in path:
        value = value[index]
    return value


def _storage_bytes(key: _StorageKey, symbols: cost.Symbols) -> int:
    return sum((cost.storage_bytes(t, symbols) for t in cost.fake_tensors(_at(key))), 0)


def _new_bytes(subgraph: Subgraph, symbols: cost.Symbols) -> int:
    """Return the bytes of the storages that the outputs lie in, without those of the inputs."""
    storages = _storages(subgraph.module)
    (output,) = (n for n in subgraph.module.graph.nodes if n.op == "output")
    owned = {storages[n] for n in output.args[0]}
    return sum(_storage_bytes(key, symbols) for key in owned if key[0].op != "placeholder")


def _workspace_bytes(subgraph: Subgraph, symbols: cost.Symbols) -> int:
    """Return the peak bytes of intermediate results if operators run one by one. Fused code needs less."""
    storages = _storages(subgraph.module)
    nodes = list(subgraph.module.graph.nodes)
    last: dict[_StorageKey, int] = {}
    first: dict[_StorageKey, int] = {}
    for number, node in enumerate(nodes):
        for source in (*node.all_input_nodes, node):
            last[storages[source]] = number
            first.setdefault(storages[source], number)
    outputs = {storages[n] for n in nodes[-1].args[0]}
    change = [0] * (len(nodes) + 1)
    for key in first:
        if key[0].op == "call_function" and key not in outputs:
            size = _storage_bytes(key, symbols)
            if isinstance(_at(key), (tuple, list)):
                # Of several results, those that no node takes live until the others have been taken.
                size -= sum(_storage_bytes(k, symbols) for k in first if k[0] is key[0] and k[1] and k[1][:-1] == key[1])
            change[first[key[0], ()]] += size
            change[last[key] + 1] -= size
    return max(itertools.accumulate(change))
