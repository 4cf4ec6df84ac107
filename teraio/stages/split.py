"""Split a graph into one subgraph for each stage that `cut.assign` found.

Each knows what it makes, which others equal it, and whether it may run again in the backward pass, so that its results are
recomputed instead of kept.

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

import hashlib
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from teraio.stages import operators as ops
from teraio.stages.cost import StorageKey, is_heavy, most_at_once, never_materialised, storages_of, tensors_of
from teraio.stages.cut import layer_of, module_path
from teraio.stages.operators import Symbols

_PURE_NAMESPACES = frozenset(("aten", "prims"))
_ALIGNMENT = 64  # bytes: what compilers of stages ask for at the most


@dataclass(frozen=True, slots=True)
class Temporary:
    """A storage that a stage makes and frees. tensors: what lies in it, fake. first, last: when it is there, by operators."""

    tensors: tuple[torch.Tensor, ...]
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Subgraph:
    """One stage of a graph, not yet compiled.

    module: takes the values of `inputs` and returns a tuple of those of `outputs`.
    inputs, outputs: nodes of the graph that was split. mutated: the inputs that it writes in place.
    key: equal for subgraphs that may share one compiled function.
    path: the modules that it came from, for names (`layers.3.attn`).
    made: fake tensors of the storages that it makes for its outputs. temporaries: what it makes beside them.
    impure: why its operators may not run again, in plain words; "" if they may.
    """

    module: GraphModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    mutated: tuple[Node, ...]
    key: str
    path: str
    made: tuple[torch.Tensor, ...]
    temporaries: tuple[Temporary, ...]
    impure: str

    @property
    def repeatable(self) -> bool:
        """Whether the stage, of any graph, may run once more right after it failed."""
        return not self.mutated and not self.impure


def split(gm: GraphModule, stage_of: Mapping[Node, int], *, fuses: bool = False) -> list[Subgraph]:
    """Return the subgraphs of `gm` in the order of execution. Does not change `gm`.

    fuses: they are compiled to fused kernels, which take random numbers from their seeds; otherwise each of their operators makes
    its result, and ignores the seeds.
    """
    nodes = sorted((node for node in gm.graph.nodes if node in stage_of), key=stage_of.__getitem__)
    return [_subgraph(gm, list(members), fuses) for _, members in groupby(nodes, stage_of.__getitem__)]


def _subgraph(gm: GraphModule, nodes: list[Node], fuses: bool) -> Subgraph:
    inside = set(nodes)
    sizes = _sizes_needed(nodes, inside)
    taken = (source for node in (*sizes, *nodes) for source in node.all_input_nodes)
    inputs = dict.fromkeys(source for source in taken if source not in inside and source not in sizes)
    inputs |= dict.fromkeys(_free_symbol_placeholders(gm, [*inputs, *nodes]))
    outputs = [n for n in nodes if any(u not in inside and not (ops.is_size(n) and u.op != "output") for u in n.users)]
    graph, copies = Graph(), dict[Node, Node]()
    for source in inputs:
        copies[source] = graph.placeholder(f"input_{len(copies)}")
        copies[source].meta = dict(source.meta)
    for node in (*sizes, *nodes):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    result = graph.output(tuple(copies[n] for n in outputs))
    result.meta["user_visible_output_idxs"] = list(range(len(outputs)))  # Inductor keeps the strides of these outputs
    module = GraphModule(gm, graph)
    module.meta = {k: v for k, v in gm.meta.items() if k != "dynamo_flat_name_to_original_fqn"}
    storages, tile = storages_of(list(graph.nodes)), ops.tile_of(nodes[-1])  # the first ones may be constants
    owned = dict.fromkeys(storages[copies[n]] for n in outputs)
    return Subgraph(
        module=module,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        mutated=tuple(n for n in inputs if ops.is_written(copies[n])),
        key=_key(module),
        # From `head.tile1` on; what comes before the first tile is `head.tile0`.
        path=path_of_modules(nodes) + ("" if tile is None else f".tile{tile[1] + 1}"),
        made=tuple(tensor for key in owned if key[0].op != "placeholder" for tensor in tensors_of(key, ())),
        temporaries=_temporaries(graph, storages, fuses),
        impure=next(filter(None, (_reason_of_operator(n, fuses) for n in nodes if n.op == "call_function")), ""),
    )


def _temporaries(graph: Graph, storages: Mapping[Node, StorageKey], fuses: bool) -> tuple[Temporary, ...]:
    """Return what a subgraph makes beside its outputs. Whatever is materialised is taken to be made in the order of the graph.

    To be called before the subgraph is compiled, because that rewrites it.
    """
    nodes = list(graph.nodes)
    first: dict[StorageKey, int] = {}
    last: dict[StorageKey, int] = {}
    for number, node in enumerate(nodes):
        for touched in (*node.all_input_nodes, node):
            last[storages[touched]] = number
            first.setdefault(storages[touched], number)
    without = {storages[n] for n in cast(Sequence[Node], graph.output_node().args[0])}
    if fuses:
        without |= never_materialised(nodes, storages)
    # Of several results, what no node takes lives until the others are taken.
    return tuple(
        Temporary(tuple(tensors_of(key, first)), first[key[0], ()], last[key])
        for key in first
        if key[0].op == "call_function" and key not in without
    )


def peak_bytes(temporaries: Sequence[Temporary], symbols: Symbols = MappingProxyType({})) -> int:
    """Return the most bytes of them at once."""
    return most_at_once((sum(ops.storage_bytes(t, symbols) for t in each.tensors), each.first, each.last) for each in temporaries)


def at_peak(temporaries: Sequence[Temporary]) -> list[torch.Tensor]:
    """Return the tensors that are there when they are the most bytes."""
    together = ([other for other in temporaries if other.first <= each.first <= other.last] for each in temporaries)
    return [tensor for each in max(together, key=peak_bytes, default=[]) for tensor in each.tensors]


def workspace_bytes(graph: Graph, *, fuses: bool) -> int:
    """Return what a subgraph, not yet compiled, needs beside its inputs and outputs. fuses: as for `split`."""
    return peak_bytes(_temporaries(graph, storages_of(list(graph.nodes)), fuses))


def _sizes_needed(nodes: list[Node], inside: set[Node]) -> dict[Node, None]:
    """Return the nodes of other subgraphs that compute symbolic sizes for this one, in order. This subgraph repeats them."""
    found: dict[Node, None] = {}

    def visit(node: Node) -> None:
        for source in node.all_input_nodes:
            if ops.is_size(source) and source not in inside and source not in found:
                visit(source)
                found[source] = None

    for node in nodes:
        visit(node)
    return found


def _free_symbol_placeholders(gm: GraphModule, nodes: list[Node]) -> list[Node]:
    """Return the placeholders of the symbolic sizes in the shapes of `nodes`. They are inputs of the subgraph as well."""
    by_symbol = ops.size_inputs(gm.graph)
    if not by_symbol:
        return []
    tensors = (tensor for node in nodes for tensor in ops.fake_tensors(node.meta.get("val")))
    sizes = (size for tensor in tensors for size in (*tensor.shape, *tensor.stride(), tensor.storage_offset()))
    symbols = (symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols)
    return list(dict.fromkeys(by_symbol[symbol] for symbol in symbols if symbol in by_symbol))


def _key(module: GraphModule) -> str:
    """Return a digest of all that compiling `module` depends on: operators, their arguments, constants, dtypes and layouts."""
    index: dict[Node, str] = {}
    lines = []
    for node in module.graph.nodes:
        index[node] = f"%{len(index)}"
        arguments: Any = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: cast(Any, _Reference(index[n])))
        target: Any = node.target if node.op == "call_function" else node.op
        if node.op == "get_attr":
            target = f"get_attr {id(operator.attrgetter(str(node.target))(module))}"
        lines.append(f"{node.op} {target} {arguments} {_layout(node.meta.get('val'))}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class _Reference(str):
    """Prints as the position of a node, so that the digest does not depend on names."""

    __repr__ = str.__str__


def _layout(value: Any) -> str:
    if ops.has_storage(value):
        return f"{value.dtype}{list(value.shape)}{list(value.stride())}+{_misaligned(value)}@{value.device}"
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}{value.layout}@{value.device}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_layout(v) for v in value)})"
    return str(value) if isinstance(value, (int, float, torch.SymInt)) else type(value).__name__


def _misaligned(tensor: torch.Tensor) -> Any:
    """Return by how many bytes a tensor begins beside an aligned address: compiled code depends on no more of its offset.

    "?" where that depends on symbolic sizes: such code takes none to be aligned.
    """
    beside: Any = tensor.storage_offset() * tensor.element_size() % _ALIGNMENT
    if isinstance(beside, int):
        return beside
    return int(beside.node.expr) if beside.node.expr.is_Integer else "?"


def path_of_modules(nodes: list[Node]) -> str:
    """Return the path of the modules that operators came from.

    `layers.3.attn` for one module, `layers.3.{qkv,proj}` for several of a layer, `layers.0..layers.1` for more.
    """
    working = [n for n in nodes if is_heavy(n)] or [n for n in nodes if module_path(n)] or nodes
    paths = list(dict.fromkeys(p for p in map(module_path, working) if p))
    if not paths:
        return "root"
    if len(paths) == 1:
        return paths[0]
    layers = list(dict.fromkeys(layer_of(p) for p in paths))
    if len(layers) > 1:
        return f"{layers[0]}..{layers[-1]}"
    inner = [p.removeprefix(layers[0]).lstrip(".") for p in paths]
    return f"{layers[0]}.{{{','.join(i or 'self' for i in inner)}}}"


def reasons_against(
    subgraphs: Sequence[Subgraph],
    *,
    visible: Collection[Node],
    written: Collection[Node],
    names: Mapping[Node, str] = MappingProxyType({}),
) -> list[str]:
    """Return for each stage of a forward graph why it may not run again, in plain words; "" if it may.

    visible: results of the graph that user code can reach. written: inputs that PyTorch changes after the graph.
    names: of the graph's inputs, for people.
    """
    changed = _storages([*written, *(node for subgraph in subgraphs for node in subgraph.mutated)])
    shown = _storages(visible)

    def reason(subgraph: Subgraph) -> str:
        if subgraph.mutated:
            first = subgraph.mutated[0]
            return f"it writes {names.get(first, first.name)} in place"
        for node in subgraph.inputs:
            if _storages([node]) & changed:
                return f"it reads {names.get(node, node.name)}, which the graph changes"
            if _storages([node]) & shown:
                return f"it reads {node.name}, a result that user code can change"
        return subgraph.impure

    return [reason(subgraph) for subgraph in subgraphs]


def _reason_of_operator(node: Node, keeps_seeds: bool) -> str:
    if ops.is_size(node) or ops.is_getitem(node):
        return ""
    if ops.carries_random_state(node):
        return "it has an operator that carries random state"
    if not isinstance(node.target, torch._ops.OpOverload):
        return f"it has the operator {node.target}, which may do more than its result shows"
    if node.target.namespace not in _PURE_NAMESPACES:
        return f"it has the custom operator {node.target}, which may do more than its result shows"
    if ops.draws_seeds(node):
        return "it draws the seeds of random numbers"
    if ops.uses_seed(node):
        return "" if keeps_seeds else "it draws random numbers, and codegen='eager' keeps no seeds of them"
    if ops.draws(node):
        return f"it draws random numbers ({ops.packet_name(node)})"
    return ""


def _storages(nodes: Collection[Node]) -> set[int]:
    return {tensor.untyped_storage()._cdata for node in nodes for tensor in ops.fake_tensors(node.meta.get("val"))}
