"""What a stage costs a device: its kernels, each with its arithmetic and the bytes that it reads and writes.

Matmuls, convolutions and attention are kernels of their own. What lies between them is fused: connected operators are one kernel,
which reads each of its inputs once and writes each result that another kernel needs once. Inductor comes close to that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from teraio.stages import cost
from teraio.stages.storages import StorageKey, bytes_at, storages_of

_LOOKUPS = frozenset("embedding index gather index_select".split())
"""Operators that read as much of their first input as they return."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """flops: floating-point operations of matmuls, convolutions and attention. dtype: of their inputs. touched_bytes: read and
    written."""

    flops: float
    dtype: torch.dtype
    touched_bytes: int


def kernels_of(graph: Graph) -> list[Kernel]:
    """Return the kernels of a subgraph, whose nodes have fake values in `meta["val"]`."""
    storages, groups = storages_of(list(graph.nodes)), fused(list(graph.nodes))
    return [_kernel(group, storages) for group in groups if not all(cost.is_view(n) or cost.is_getitem(n) for n in group)]


_FUSED = frozenset(
    "sum mean prod amax amin any all var_mean argmax argmin clone convert_element_type gather embedding index".split()
)
"""Operators that Inductor fuses with others, beside those that work on each element by itself."""
_MOST_FUSED = 64
"""Operators in one kernel: Inductor's `max_fusion_size`."""


def never_materialised(nodes: Sequence[Node]) -> set[StorageKey]:
    """Return the storages that one fused kernel makes and that nothing else uses: its code keeps such values in registers.

    nodes: of a graph, in the order of execution; others may use their results.
    """
    storages = storages_of(nodes)
    kernels = [kernel for kernel in fused(nodes) if len(kernel) <= _MOST_FUSED]
    kernel_of = {node: number for number, kernel in enumerate(kernels) for node in kernel if _is_fused(node)}
    touching: dict[StorageKey, set[int | None]] = {}
    for node in nodes:
        for touched in (node, *node.users):
            touching.setdefault(storages[node], set()).add(kernel_of.get(touched))
    return {key for key, by in touching.items() if len(by) == 1 and None not in by and key[0] in kernel_of}


def _is_fused(node: Node) -> bool:
    """Return whether Inductor certainly writes code of its own for the operator, and calls none of a library."""
    tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else []
    name = cost.packet_name(node)
    return torch.Tag.pointwise in tags or name in _FUSED or cost.is_view(node) or cost.is_getitem(node) or cost.is_creation(node)


def fused(nodes: Sequence[Node]) -> list[list[Node]]:
    """Return the nodes of each kernel, in the order in which the kernels can run. Sizes, inputs and outputs are in none.

    nodes: of a graph, in the order of execution.
    """
    nodes = [node for node in nodes if node.op == "call_function" and not cost.is_size(node)]
    heavy = {node for node in nodes if cost.flops(node) > 0}
    after: dict[Node, int] = {}  # the most kernels of other kinds on a way to the node; operators around one cannot be fused
    for node in nodes:
        after[node] = max((after[s] + (s in heavy) for s in node.all_input_nodes if s in after), default=0)
    groups = [*([node] for node in heavy), *_connected([node for node in nodes if node not in heavy], after)]
    order = {node: position for position, node in enumerate(nodes)}
    return sorted(groups, key=lambda group: max(order[node] for node in group))


def _connected(nodes: Sequence[Node], after: Mapping[Node, int]) -> list[list[Node]]:
    """Return groups of nodes: one that takes the result of another, and comes after the same number, is in its group."""
    group_of: dict[Node, list[Node]] = {}
    for node in nodes:
        mine = [node]
        for source in node.all_input_nodes:
            other = group_of.get(source)
            if other is not None and other is not mine and after[source] == after[node]:
                other.extend(mine)
                for member in mine:
                    group_of[member] = other
                mine = other
        group_of[node] = mine
    return list({id(group): group for group in group_of.values()}.values())


def _kernel(group: Sequence[Node], storages: dict[Node, StorageKey]) -> Kernel:
    inside = set(group)
    read: dict[StorageKey, int] = {}
    written: set[StorageKey] = set()
    for node in group:
        for source in node.all_input_nodes:
            if source not in inside:
                size = cost.output_bytes(source)
                if cost.packet_name(node) in _LOOKUPS and source is node.all_input_nodes[0]:
                    size = min(size, cost.output_bytes(node))
                read[storages[source]] = max(read.get(storages[source], 0), size)
        if any(user not in inside for user in node.users):
            written.add(storages[node])
    heavy = [node for node in group if cost.flops(node) > 0]
    touched = sum(read.values()) + sum(bytes_at(key) for key in written if key not in read)
    return Kernel(flops=sum(map(cost.flops, heavy)), dtype=_dtype(heavy or group), touched_bytes=touched)


def _dtype(nodes: Iterable[Node]) -> torch.dtype:
    """Return the precision of the first input, or result, with floating-point numbers."""
    for node in nodes:
        values: list[Any] = [source.meta.get("val") for source in node.all_input_nodes]
        for value in (*values, node.meta.get("val")):
            for tensor in cost.fake_tensors(value):
                if tensor.dtype.is_floating_point:
                    return tensor.dtype
    return torch.float32


def operator_kernel(operator: torch._ops.OpOverload, arguments: Mapping[str, Any], result: Any) -> Kernel | None:
    """Return the kernel of one call of an operator with fake tensors, by names of arguments; None for a view, which runs none."""
    read = list(cost.fake_tensors(list(arguments.values())))
    made = list(cost.fake_tensors(result))
    schema = operator._schema
    storages = {tensor.untyped_storage()._cdata for tensor in read}
    if not schema.is_mutable and made and all(tensor.untyped_storage()._cdata in storages for tensor in made):
        return None
    changed = [arguments.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    written = [*(t for t in made if t.untyped_storage()._cdata not in storages), *cost.fake_tensors(changed)]
    flops = cost.operator_flops(operator, list(arguments.values()), {}, result)
    dtype = next((t.dtype for t in (*read, *made) if t.dtype.is_floating_point), torch.float32)
    return Kernel(flops, dtype, sum(cost.storage_bytes(tensor) for tensor in (*read, *written)))
