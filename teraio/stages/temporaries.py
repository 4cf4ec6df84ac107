"""What the operators of a stage make beside its outputs, worked out before the stage is compiled: that rewrites its graph."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.fx import Graph

from teraio.stages import cost
from teraio.stages.kernels import never_materialised
from teraio.stages.storages import StorageKey, storages_of, tensors_of


@dataclass(frozen=True, slots=True)
class Temporary:
    """A storage that a stage makes and frees. tensors: what lies in it, fake. first, last: when it is there, by operators."""

    tensors: tuple[torch.Tensor, ...]
    first: int
    last: int


def temporaries_of(graph: Graph, *, fuses: bool) -> tuple[Temporary, ...]:
    """Return what a subgraph makes beside its outputs. Whatever is materialised is taken to be made in the order of the graph.

    fuses: it is compiled to fused kernels, which keep values in registers, see `never_materialised`.
    """
    nodes = list(graph.nodes)
    storages = storages_of(nodes)
    first: dict[StorageKey, int] = {}
    last: dict[StorageKey, int] = {}
    for number, node in enumerate(nodes):
        for touched in (*node.all_input_nodes, node):
            last[storages[touched]] = number
            first.setdefault(storages[touched], number)
    without = {storages[n] for n in nodes[-1].args[0]} | (never_materialised(nodes) if fuses else set())
    # Of several results, what no node takes lives until the others are taken.
    return tuple(
        Temporary(tuple(tensors_of(key, first)), first[key[0], ()], last[key])
        for key in first
        if key[0].op == "call_function" and key not in without
    )


def made_by(graph: Graph) -> tuple[torch.Tensor, ...]:
    """Return the fake tensors of the storages that the outputs of a subgraph lie in, without those of its inputs."""
    storages = storages_of(list(graph.nodes))
    (output,) = (n for n in graph.nodes if n.op == "output")
    owned = dict.fromkeys(storages[n] for n in output.args[0])
    return tuple(tensor for key in owned if key[0].op != "placeholder" for tensor in tensors_of(key, ()))


def peak_bytes(temporaries: Sequence[Temporary], symbols: cost.Symbols = MappingProxyType({})) -> int:
    """Return the most bytes of them at once."""
    change = [0] * (max((each.last for each in temporaries), default=0) + 2)
    for each in temporaries:
        size = sum(cost.storage_bytes(tensor, symbols) for tensor in each.tensors)
        change[each.first] += size
        change[each.last + 1] -= size
    return max(itertools.accumulate(change))
