"""What operators and stages cost a device: estimated seconds, kernels, and bytes.

The seconds of a graph node follow from its floating-point operations, its bytes, and a device's speed. They decide where graphs
are cut and how stages are named. Measured times replace the estimates everywhere else: what is measured varies, so that each run
would have other stages, which no plan from a file fits. So speeds are constants, too.

Matmuls, convolutions and attention are kernels of their own. What lies between them is fused: connected operators are one kernel,
which reads each of its inputs once and writes each result that another kernel needs once. Inductor comes close to that.
Bytes are counted by storages: nodes that view one storage share it.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import networkx as nx
import torch
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from teraio.stages import operators as ops

_log = logging.getLogger("teraio")

_ARITHMETIC, _TRAFFIC = 0.6, 0.8  # the share of the data sheet's figures that kernels reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What kernels reach. flops_per_second: with numbers of 32 bits and more; short: of 16 bits and less."""

    flops_per_second: float
    short_flops_per_second: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class _DataSheet:
    """A GPU. flops: per second with 32 bits; short: dense, with 16 bits."""

    capability: tuple[int, int]
    multiprocessors: int
    flops: float
    short: float
    bytes_per_second: float


SpeedOf = Callable[[torch.device], Speed]  # says how fast a device is

_H200 = _DataSheet((9, 0), 132, 67e12, 989e12, 4.8e12)
# By NVIDIA's data sheets, ascending. Others count as the one before them, and by their number of multiprocessors.
_KNOWN = (
    _DataSheet((7, 0), 80, 15.7e12, 125e12, 0.9e12),  # V100
    _DataSheet((7, 5), 40, 8.1e12, 65e12, 0.32e12),  # T4
    _DataSheet((8, 0), 108, 19.5e12, 312e12, 2.0e12),  # A100
    _DataSheet((8, 6), 84, 37.4e12, 150e12, 0.7e12),  # A40
    _DataSheet((8, 9), 142, 91.6e12, 362e12, 0.86e12),  # L40S
    _H200,
    _DataSheet((10, 0), 148, 75e12, 2250e12, 8.0e12),  # B200
    _DataSheet((12, 0), 170, 104.8e12, 209.5e12, 1.79e12),  # RTX 5090
)

# One or two cores. With more, stages are shorter than wanted, and the smallest budget stays as low.
CPU = Speed(flops_per_second=1e11, short_flops_per_second=1e11, bytes_per_second=1e10)


def speed_of(device: torch.device) -> Speed:
    """Return the speed of a CPU or GPU. Never measures, never waits."""
    if device.type == "cpu":
        return CPU
    if device.type != "cuda" or not torch.cuda.is_available():
        return gpu_speed(_H200.capability, _H200.multiprocessors, reduced=False)
    found = torch.cuda.get_device_properties(device)
    return gpu_speed((found.major, found.minor), found.multi_processor_count, reduced=reduces_products())


def reduces_products() -> bool:
    """Return whether products of 32 bits on a GPU take the tensor cores, by TF32."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def gpu_speed(capability: tuple[int, int], multiprocessors: int, *, reduced: bool) -> Speed:
    """Return the speed of a GPU. reduced: see `reduces_products`."""
    sheet = next((each for each in reversed(_KNOWN) if each.capability <= capability), _KNOWN[0])
    share = multiprocessors / sheet.multiprocessors
    flops = max(sheet.flops, sheet.short / 2) if reduced else sheet.flops
    return Speed(
        flops_per_second=_ARITHMETIC * share * flops,
        short_flops_per_second=_ARITHMETIC * share * sheet.short,
        bytes_per_second=_TRAFFIC * share * sheet.bytes_per_second,
    )


def is_heavy(node: Node) -> bool:
    """Return whether `node` is a matmul, a convolution or attention: a kernel of its own, and the place of a cut."""
    return flops(node) > 0


def flops(node: Node) -> float:
    """Return the floating-point operations of a matmul, a convolution or attention; 0 for every other node."""
    target, arguments, named = ops.unwrapped(node)
    if not isinstance(target, torch._ops.OpOverload) or not (_is_attention(target) or target._overloadpacket in flop_registry):
        return 0.0
    args, kwargs = torch.fx.node.map_arg((tuple(arguments), dict(named)), lambda source: source.meta.get("val"))
    return operator_flops(target, cast(Any, args), cast(Any, kwargs), node.meta.get("val"))


def operator_flops(target: torch._ops.OpOverload, arguments: Sequence[Any], named: Mapping[str, Any], result: Any) -> float:
    """Return the floating-point operations of one call of an operator. arguments, named, result: fake tensors, and others.

    By PyTorch's formulas. An operator whose formula fails counts two operations for each element of its results.
    """
    # Those for attention in PyTorch 2.11 refuse fewer heads of keys than of queries, and do not know the CPU's kernel.
    if _is_attention(target):
        return _attention_flops(ops.base_name(target), arguments)
    formula = flop_registry.get(target._overloadpacket)
    if formula is None:
        return 0.0
    try:
        return float(ops.known_size(cast(Any, formula)(*arguments, **named, out_val=result)))
    except Exception as error:  # an estimate must not stop training, and formulas fail in ways of their own
        _log.debug("PyTorch cannot count the operations of %s: %r", target, error)
        # So that it still has arithmetic, and is the place of a cut.
        return 2.0 * sum(ops.known_size(t.numel()) for t in ops.fake_tensors(result))


def _is_attention(target: torch._ops.OpOverload) -> bool:
    return ops.base_name(target).startswith("_scaled_dot_product")


def _attention_flops(name: str, arguments: Sequence[Any]) -> float:
    """Return the operations of fused attention."""
    backward = "backward" in name  # it has the gradient of the results as its first argument
    query, key = arguments[backward : backward + 2]
    # Each query head meets all keys: scores, and their product with the values.
    forward = 4.0 * math.prod(ops.known_size(s) for s in query.shape) * ops.known_size(key.shape[-2])
    return 2.5 * forward if backward else forward  # the backward pass makes the scores again, and four products


def seconds(node: Node, speed: Speed) -> float:
    """Return the estimated duration of `node`, by a simple roofline model."""
    if node.op != "call_function" or ops.is_view(node) or ops.is_getitem(node):
        return 0.0
    touched = ops.output_bytes(node) + sum(ops.output_bytes(n) for n in node.all_input_nodes)
    rate = speed.short_flops_per_second if ops.precision(ops.tensors_at(node)).itemsize <= 2 else speed.flops_per_second
    return max(flops(node) / rate, touched / speed.bytes_per_second)


# The node that owns a storage, and which of its results: the indices that lead to it, as results may be nested.
StorageKey = tuple[Node, tuple[Any, ...]]


def storages_of(nodes: Sequence[Node]) -> dict[Node, StorageKey]:
    """Return, for each of some nodes of a graph in order and for what they take, the storage that its result lies in."""
    keys: dict[Node, StorageKey] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            keys.setdefault(source, (source, ()))
        first = node.all_input_nodes[0] if node.all_input_nodes else None
        shares = ops.is_view(node) or ops.writes_first(node)
        if first is None or not (shares or ops.is_getitem(node)) or first.meta.get("val") is None:
            keys[node] = (node, ())
        elif shares or not isinstance(_at(keys[first]), (tuple, list)):
            keys[node] = keys[first]
        else:
            keys[node] = (keys[first][0], (*keys[first][1], node.args[1]))
    return keys


def tensors_of(key: StorageKey, keys: Iterable[StorageKey]) -> list[torch.Tensor]:
    """Return the fake tensors that lie in a storage. Several results come without those in `keys`."""
    value = _at(key)
    if not isinstance(value, (tuple, list)):
        return list(ops.fake_tensors(value))
    apart = {k[1][-1] for k in keys if k[0] is key[0] and k[1] and k[1][:-1] == key[1]}
    return [tensor for index, item in enumerate(value) if index not in apart for tensor in ops.fake_tensors(item)]


def _at(key: StorageKey) -> Any:
    """Return the fake value that lies there: a tensor, or several."""
    owner, path = key
    value: Any = owner.meta.get("val")
    for index in path:
        value = value[index]
    return value


def most_at_once(held: Iterable[tuple[int, int, int]]) -> int:
    """Return the most bytes of some storages at once. held: of each its bytes, and the positions from which and up to which it is
    there."""
    change: dict[int, int] = defaultdict(int)
    for size, first, last in held:
        change[first] += size
        change[last + 1] -= size
    return max(itertools.accumulate(change[position] for position in sorted(change)), default=0)


# What a kernel computes: a matmul or convolution, attention, connected operators of a graph, or one operator outside of graphs.
KernelKind = Literal["product", "attention", "attention backward", "fused", "operator"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel. flops: floating-point operations of matmuls, convolutions and attention. dtype: of their inputs. touched_bytes:
    read and written. result: of a product, its matrices, rows and columns; () if that is not known. of_forward: whether it is
    one of the forward pass; in a backward graph such a kernel runs again. whole_tiles: what a GPU's attention computes, over its
    operations, where tiles are longer than what is left of the rows."""

    flops: float
    dtype: torch.dtype
    touched_bytes: int
    kind: KernelKind = "operator"
    result: tuple[int, ...] = ()
    of_forward: bool = False
    whole_tiles: float = 1.0

    @property
    def model_flops(self) -> float:
        """The operations without the scores that fused attention makes again in the backward pass: one product of five."""
        return 0.8 * self.flops if self.kind == "attention backward" else self.flops


def kernels_of(graph: Graph) -> list[Kernel]:
    """Return the kernels of a subgraph, whose nodes have fake values in `meta["val"]`."""
    nodes = list(graph.nodes)
    storages = storages_of(nodes)
    inlined = _inlined(nodes)
    found = (_kernel(group, storages, inlined) for group in _fused(nodes))
    return [kernel for kernel in found if kernel is not None]


# Operators that read as much of their first input as they return.
_LOOKUPS = frozenset("embedding index gather index_select".split())


def _kernel(group: Sequence[Node], storages: Mapping[Node, StorageKey], inlined: Mapping[Node, frozenset[Node]]) -> Kernel | None:
    inside = set(group)
    read: dict[StorageKey, int] = {}
    written: set[StorageKey] = set()
    for node in group:
        for source in node.all_input_nodes:
            for origin in inlined.get(source, (source,)) if source not in inside else ():
                size = ops.output_bytes(origin)
                if ops.packet_name(node) in _LOOKUPS and source is node.all_input_nodes[0]:
                    size = min(size, ops.output_bytes(node))
                read[storages[origin]] = max(read.get(storages[origin], 0), size)
        if any(user not in inside for user in node.users):
            written.update(storages[origin] for origin in inlined.get(node, (node,)) if origin in inside)
    if not written and all(node.users and _is_fused(node) for node in group):
        return None  # views, and what each kernel that needs it computes for itself
    heavy = next((node for node in group if is_heavy(node)), None)  # a kernel of its own
    made = (tensor for key in written if key not in read for tensor in ops.fake_tensors(_at(key)))
    touched = sum(read.values()) + sum(map(ops.storage_bytes, made))
    if heavy is None:
        return Kernel(0.0, ops.precision(tensor for node in group for tensor in ops.tensors_at(node)), touched, "fused")
    operator, arguments, named = ops.unwrapped(heavy)
    given = torch.fx.node.map_arg(ops.by_name(operator, arguments, named), lambda source: source.meta.get("val"))
    kernel = _heavy(operator, given, heavy.meta.get("val"), flops(heavy), ops.precision(ops.tensors_at(heavy)), touched)
    # PyTorch makes the wrappers of random operators without its mark, in both graphs and for nothing else.
    return replace(kernel, of_forward=heavy.meta.get("partitioner_tag") == "is_forward" or ops.carries_random_state(heavy))


_MOST_READ = 4  # what an element is computed from that is not stored: Inductor's `realize_reads_threshold`


def _inlined(nodes: Sequence[Node]) -> dict[Node, frozenset[Node]]:
    """Return the nodes that are never stored, each with the stored nodes that it is computed from.

    Inductor computes such elements anew in each kernel that reads them. It stores what a library's kernel takes, what leaves the
    graph, and the results of reductions.
    """
    stored: set[Node] = set()
    for node in reversed(nodes):
        for source in node.all_input_nodes:
            if not _is_fused(node) or (ops.is_view(node) and node in stored):
                stored.add(source)
    found: dict[Node, frozenset[Node]] = {}
    for node in nodes:
        free = ops.is_view(node) or ops.is_getitem(node)
        if not free and (node in stored or not (_is_pointwise(node) or ops.is_creation(node))):
            continue
        origins = frozenset(o for source in node.all_input_nodes for o in found.get(source, frozenset((source,))))
        if free or len(origins) <= _MOST_READ:
            found[node] = origins
    return found


def _is_pointwise(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in node.target.tags or ops.packet_name(node) == "convert_element_type"
    )


def _heavy(
    operator: torch._ops.OpOverload,
    arguments: Mapping[str, Any],
    result: Any,
    operations: float,
    dtype: torch.dtype,
    touched: int,
) -> Kernel:
    """Return the kernel of a matmul, a convolution or attention, by the names of its arguments."""
    name = ops.base_name(operator)
    if name.startswith("_scaled_dot_product"):
        rows, columns = (ops.known_size(arguments[name].shape[-2]) for name in ("query", "key"))
        kind: KernelKind = "attention backward" if "backward" in name else "attention"
        whole = _tiles(rows) * _tiles(columns) * _ATTENTION_ROWS**2 / (rows * columns)
        # Causal attention computes the tiles on and below the diagonal.
        share = (_tiles(rows) + 1) / (2 * _tiles(rows)) if arguments.get("is_causal") else 1.0
        return Kernel(operations * share, dtype, touched, kind, whole_tiles=whole)
    first = next(ops.fake_tensors(result), None)
    if first is None or first.ndim < 2 or "backward" in name:
        return Kernel(operations, dtype, touched, "product")
    sizes = [ops.known_size(size) for size in first.shape]
    if "conv" in name:
        return Kernel(operations, dtype, touched, "product", (1, math.prod(sizes) // sizes[1], sizes[1]))
    return Kernel(operations, dtype, touched, "product", (math.prod(sizes[:-2]), sizes[-2], sizes[-1]))


_ATTENTION_ROWS = 128  # of queries, and of keys, that a block of a fused kernel multiplies at once


def _tiles(rows: int) -> int:
    return -(-rows // _ATTENTION_ROWS)


# Operators that take of their first argument the sizes only, or overwrite it without reading it.
_OVERWRITING = frozenset(
    "zeros_like ones_like full_like rand_like randn_like randint_like new_zeros new_ones new_full new_tensor "
    "zero_ fill_ copy_ uniform_ normal_ log_normal_ random_ bernoulli_ exponential_ geometric_ cauchy_ "
    "_foreach_zero_ _foreach_copy_".split()
)
_EMPTY = frozenset("empty empty_like empty_strided empty_permuted new_empty new_empty_strided".split())


def operator_kernel(operator: torch._ops.OpOverload, arguments: Mapping[str, Any], result: Any) -> Kernel | None:
    """Return the kernel of one call of an operator with fake tensors, by names of arguments; None if it reads and makes no data.

    Such are views, room for results, and what only asks: for a device, a size, a mark in a profile.
    """
    read = {id(tensor): tensor for tensor in ops.fake_tensors(list(arguments.values()))}
    storages = {tensor.untyped_storage()._cdata for tensor in read.values()}
    made = [tensor for tensor in ops.fake_tensors(result) if tensor.untyped_storage()._cdata not in storages]
    # PyTorch's fused optimizers say that they write gradients. They do if they take a scale out of them.
    reads_gradients = arguments.get("grad_scale") is None
    written = [name for name in ops.written_names(operator) if not (name == "grads" and reads_gradients)]
    changed = list(ops.fake_tensors([arguments.get(name) for name in written]))
    name, tags = ops.base_name(operator), operator.tags
    if name in _EMPTY or torch.Tag.inplace_view in tags or not (made or changed or torch.Tag.data_dependent_output in tags):
        return None
    sizes = {key: ops.storage_bytes(tensor) for key, tensor in read.items()}
    written_bytes = sum(map(ops.storage_bytes, (*made, *changed)))
    for position, argument in enumerate(operator._schema.arguments):
        if argument.is_out or (position == 0 and name in _OVERWRITING):
            for unread in ops.fake_tensors(arguments.get(argument.name)):
                sizes.pop(id(unread), None)
    if name in _LOOKUPS:
        first = next(iter(sizes))
        sizes[first] = min(sizes[first], written_bytes)
    touched = sum(sizes.values()) + written_bytes
    dtype = ops.precision([*read.values(), *made])
    operations = operator_flops(operator, list(arguments.values()), {}, result)
    return _heavy(operator, arguments, result, operations, dtype, touched) if operations else Kernel(0.0, dtype, touched)


# Operators that Inductor fuses with others, beside those that work on each element by itself.
_FUSED = frozenset(
    "sum mean prod amax amin any all var_mean argmax argmin clone convert_element_type gather embedding index".split()
)
_MOST_FUSED = 64  # operators in one kernel: Inductor's `max_fusion_size`


def never_materialised(nodes: Sequence[Node], storages: Mapping[Node, StorageKey]) -> set[StorageKey]:
    """Return the storages that one fused kernel makes and that nothing else uses: its code keeps such values in registers.

    nodes: of a graph, in the order of execution; others may use their results. storages: `storages_of(nodes)`.
    """
    kernels = [kernel for kernel in _fused(nodes) if len(kernel) <= _MOST_FUSED]
    kernel_of = {node: number for number, kernel in enumerate(kernels) for node in kernel if _is_fused(node)}
    touching: dict[StorageKey, set[int | None]] = {}
    for node in nodes:
        for touched in (node, *node.users):
            touching.setdefault(storages[node], set()).add(kernel_of.get(touched))
    found = {key for key, by in touching.items() if len(by) == 1 and None not in by and key[0] in kernel_of}
    return found | {storages[node] for node in nodes if _becomes_a_result(node)}


# Operators whose result Inductor makes by copying the first argument and then writing to the copy.
_WRITE_TO_A_COPY = frozenset("index_put _unsafe_masked_index_put_accumulate scatter scatter_add scatter_reduce".split())


def _becomes_a_result(node: Node) -> bool:
    """Return whether `node` is a constant, such as the zeros that gradients of an embedding are added to, that is only written
    where another operator has its result."""
    return ops.is_creation(node) and all(
        ops.packet_name(user) in _WRITE_TO_A_COPY and user.args[0] is node for user in node.users
    )


def _is_fused(node: Node) -> bool:
    """Return whether Inductor certainly writes code of its own for the operator, and calls none of a library."""
    free = ops.is_view(node) or ops.is_getitem(node)
    return free or _is_pointwise(node) or ops.is_creation(node) or ops.packet_name(node) in _FUSED


def _fused(nodes: Sequence[Node]) -> list[list[Node]]:
    """Return the nodes of each kernel, in the order in which the kernels can run. Sizes, inputs and outputs are in none.

    nodes: of a graph, in the order of execution.
    """
    nodes = [node for node in nodes if node.op == "call_function" and not ops.is_size(node)]
    heavy = {node for node in nodes if is_heavy(node)}
    after: dict[Node, int] = {}  # the most kernels of other kinds on a way to the node; operators around one cannot be fused
    for node in nodes:
        after[node] = max((after[s] + (s in heavy) for s in node.all_input_nodes if s in after), default=0)
    others = nx.Graph()
    others.add_nodes_from(node for node in nodes if node not in heavy)
    taken = ((source, node) for node in others for source in node.all_input_nodes)
    others.add_edges_from((source, node) for source, node in taken if source in others and after[source] == after[node])
    order = {node: position for position, node in enumerate(nodes)}
    connected = (sorted(group, key=order.__getitem__) for group in nx.connected_components(others))
    return sorted([*([node] for node in heavy), *connected], key=lambda group: order[group[-1]])
