"""What the nodes of a graph are: views, constants, sizes, random numbers, collectives; and the fake tensors that they make.

[Note: Collectives]
From its launch to the operator that waits for it, a collective reads and writes its tensors while the graph goes on. And all
ranks must launch the same collectives in the same order, although their sizes may differ. So:
* A launch stays where the graph has it. Nothing that depends on sizes moves it past another one.
* It is waited for in the stage that launches it. No block is paged, moved or freed while a collective works on it, because stages
  hold what they read and make until they have ended.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeGuard

import sympy
import torch
from torch._guards import TracingContext
from torch._prims import rng_prims
from torch.fx import Graph, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

# Values of symbolic sizes (sympy symbols). What stands for a missing one: see `known_size`.
Symbols = Mapping[Any, int]


_UNBOUNDED = 1 << 48  # PyTorch writes no bound as its infinity, or as the largest index


def has_storage(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether `value` is a tensor in a storage of its own; a sparse tensor is not."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def fake_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the (fake) tensors with a storage in a node's `meta["val"]`: a tensor, a number or nested lists of these."""
    if has_storage(value):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from fake_tensors(item)


def storage_bytes(tensor: torch.Tensor, symbols: Symbols = MappingProxyType({})) -> int:
    """Return the bytes of the smallest storage that holds `tensor`, from its storage offset on."""
    sizes = [known_size(s, symbols) for s in tensor.shape]
    strides = [known_size(s, symbols) for s in tensor.stride()]
    if 0 in sizes:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return (last + 1) * tensor.element_size()


def output_bytes(node: Node) -> int:
    """Return the bytes of all tensors that `node` returns. Symbolic sizes: see `known_size`."""
    return sum(map(storage_bytes, fake_tensors(node.meta.get("val"))))


def tensors_at(node: Node) -> Iterator[torch.Tensor]:
    """Yield the fake tensors that `node` takes, and then those that it returns."""
    return fake_tensors([*(source.meta.get("val") for source in node.all_input_nodes), node.meta.get("val")])


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Return the device on which some tensors are worked on: that of the first one that is not on the CPU, else the CPU."""
    return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))


def precision(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """Return the type of the first of some tensors with floating-point numbers; float32 if there is none."""
    return next((tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point), torch.float32)


def known_size(size: int | torch.SymInt, symbols: Symbols = MappingProxyType({})) -> int:
    """Return a size as a number: by the values of its symbols, or else the largest size that is known.

    That is what the user has promised (`torch._dynamo.mark_dynamic(..., max=)`), so that the cut of a graph does not depend on
    which batch came first; or else the hint, the size at compilation. A size that depends on data has none: 1.
    """
    if isinstance(size, int):
        return size
    expression = size.node.expr
    if not expression.free_symbols <= symbols.keys():
        symbols = _largest(size)
    if symbols and expression.free_symbols <= symbols.keys():
        return int(expression.xreplace({s: sympy.Integer(symbols[s]) for s in expression.free_symbols}))
    return int(size.node.hint if size.node.hint is not None else 1)


def _largest(size: torch.SymInt) -> Symbols:
    """Return the upper bounds of those symbols of a size that have one."""
    ranges = size.node.shape_env.var_to_range
    bounds = {symbol: ranges[symbol].upper for symbol in size.node.expr.free_symbols if symbol in ranges}
    return {symbol: int(bound) for symbol, bound in bounds.items() if bound.is_finite and bound < _UNBOUNDED}


def is_symbolic(nodes: Iterable[Node]) -> bool:
    """Return whether one of the nodes is, or has, a symbolic size."""
    values = (node.meta.get("val") for node in nodes)
    sizes = (value.shape if isinstance(value, torch.Tensor) else (value,) for value in values)
    return any(isinstance(size, torch.SymInt) for shape in sizes for size in shape)


def is_size(node: Node) -> bool:
    """Return whether `node` computes a symbolic size from symbolic sizes."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def is_read_off(node: Node) -> bool:
    """Return whether `node` takes a symbolic size from a tensor."""
    return is_size(node) and any(isinstance(n.meta.get("val"), torch.Tensor) for n in node.all_input_nodes)


def tensors_taken(node: Node) -> list[Node]:
    """Return what `node` takes, but for symbolic sizes."""
    return [n for n in node.all_input_nodes if not isinstance(n.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))]


def packet_name(node: Node) -> str:
    """Return the base name of the operator (`mm` for `aten.mm.default`), or "" if the target is no operator."""
    return base_name(node.target) if isinstance(node.target, torch._ops.OpOverload) else ""


def base_name(target: torch._ops.OpOverload) -> str:
    """Return the name of an operator without namespace and overload."""
    return target._schema.name.split("::")[1]


_CLASS_LOSSES = frozenset("_log_softmax nll_loss_forward nll_loss_backward _log_softmax_backward_data".split())


def has_class_loss(graph: Graph) -> bool:
    """Return whether the graph computes a loss over classes or its gradient for all rows, also after these were decomposed."""
    written = (node.meta.get("original_aten") for node in graph.nodes)
    return all(tile_of(node) is None for node in graph.nodes) and any(
        isinstance(each, torch._ops.OpOverload) and base_name(each) in _CLASS_LOSSES for each in written
    )


_VIEW_NAMES = frozenset(
    "view reshape _unsafe_view permute t transpose unsqueeze squeeze expand slice select as_strided alias detach "
    "unbind split split_with_sizes diagonal unfold wait_tensor".split()
)
_CREATION_NAMES = frozenset("full scalar_tensor iota arange zeros ones empty".split())


TILE = "teraio_tile"  # in `meta`


def tile_of(node: Node) -> tuple[str, int] | None:
    """Return the region and the number of the tile that `node` belongs to; None if to none: see [Note: Tiles]."""
    found: tuple[str, int] | None = node.meta.get(TILE)
    return found


def settled(value: Any, *writes: Any) -> Any:
    """Stands in a graph for `value` once it has been written in place: see [Note: Tiles]."""
    return value


def is_view(node: Node) -> bool:
    """Return whether the result shares the storage of the input and costs nothing."""
    return packet_name(node) in _VIEW_NAMES or node.target is settled


def is_getitem(node: Node) -> bool:
    """Return whether `node` takes one of several results of an operator."""
    return node.target is operator.getitem


def is_creation(node: Node) -> bool:
    """Return whether `node` makes a constant without tensor inputs, which is cheap enough to be repeated where it is used."""
    return packet_name(node) in _CREATION_NAMES and not tensors_taken(node) and not is_written(node)


def writes_first(node: Node) -> bool:
    """Return whether the result of `node` is its first argument, written in place."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return False
    return packet_name(node).endswith("_") and len(target._schema.returns) == 1


def is_written(value: Node) -> bool:
    """Return whether a graph writes `value` in place, directly or through a view.

    An operator without a schema is taken to write. To be called before the graph is compiled, because that rewrites it.
    """
    for user in value.users:
        target, arguments, named_arguments = unwrapped(user)
        if not isinstance(target, torch._ops.OpOverload):
            if user.op != "output" and not is_size(user) and not is_getitem(user) and target is not settled:
                return True
        elif target._schema.is_mutable:
            named = by_name(target, arguments, named_arguments)
            if any(each is value for each in tree_leaves([named.get(name) for name in written_names(target)])):
                return True
        if (is_view(user) or is_getitem(user)) and is_written(user):
            return True
    return False


def by_name(target: torch._ops.OpOverload, arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call of an operator by their names."""
    return dict(zip((argument.name for argument in target._schema.arguments), arguments, strict=False)) | dict(named)


def written_names(target: torch._ops.OpOverload) -> list[str]:
    """Return the names of the arguments that an operator writes."""
    return [each.name for each in target._schema.arguments if each.alias_info is not None and each.alias_info.is_write]


# Random numbers. In graphs for Inductor, one operator draws the seeds of all, and others make numbers of these seeds.


def draws_seeds(node: Node) -> bool:
    """Return whether `node` draws the seeds of Inductor's random numbers."""
    return packet_name(node) in ("inductor_seed", "inductor_seeds")


def uses_seed(node: Node) -> bool:
    """Return whether `node` makes random numbers of a seed. Where stages run operator by operator it draws them instead."""
    return packet_name(node) in ("inductor_random", "inductor_randint")


def draws(node: Node) -> bool:
    """Return whether an operator of PyTorch changes the state of a random generator."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    # Attention is tagged also where it drops nothing.
    drops = any(argument.name == "dropout_p" for argument in target._schema.arguments)
    return not drops or by_name(target, node.args, node.kwargs).get("dropout_p", 0.0) != 0


# Random state. So that a checkpointed region draws the same numbers when backward recomputes it, PyTorch wraps a random operator,
# such as attention or dropout, in a higher-order operator; also so that the shards of a DTensor draw what the whole would. A
# graph is cut around them as around any operator.

SAVES_STATE = rng_prims.run_and_save_rng_state  # returns the state and the operator's result; the others only the latter
_BEFORE_OPERATOR = {  # how many arguments of each wrapper come before the operator inside
    getattr(rng_prims, name): count
    for name, count in {
        "run_and_save_rng_state": 0,  # (operator, ...)
        "run_with_rng_state": 1,  # (state, operator, ...)
        "graphsafe_run_with_rng_state": 0,  # (operator, ..., rng_state=generator)
        "run_dtensor_rng_op": 2,  # (offset before, offset after, operator, ...); from PyTorch 2.14 on
    }.items()
    if hasattr(rng_prims, name)
}


def carries_random_state(node: Node) -> bool:
    """Return whether `node` wraps an operator to save its random state or to run with a given one."""
    return node.target in _BEFORE_OPERATOR


def unwrapped(node: Node) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """Return the operator that `node` runs, and its arguments: of a node with random state those of the operator inside."""
    if not carries_random_state(node):
        return node.target, node.args, node.kwargs
    at = _BEFORE_OPERATOR[node.target]
    return node.args[at], node.args[at + 1 :], {name: value for name, value in node.kwargs.items() if name != "rng_state"}


# Namespaces of the collectives whose results `_c10d_functional.wait_tensor` waits for.
FUNCTIONAL_COLLECTIVES = frozenset(("_c10d_functional", "_c10d_functional_autograd"))
_COLLECTIVES = FUNCTIONAL_COLLECTIVES | {"_dtensor", "c10d_functional", "symm_mem"}
_WAIT = "wait_tensor"


def is_wait(node: Node) -> bool:
    """Return whether `node` waits for the result of a collective, which it returns."""
    return _is_distributed(node) and packet_name(node) == _WAIT


def is_launch(node: Node) -> bool:
    """Return whether `node` begins a collective."""
    if not _is_distributed(node) or packet_name(node) == _WAIT:
        return False
    return next(fake_tensors(node.meta.get("val")), None) is not None  # some only look up the process group of a mesh


def has_collectives(graph: Graph) -> bool:
    """Return whether the graph begins collectives, or waits for some."""
    return any(is_wait(node) or is_launch(node) for node in graph.nodes)


def launch_of(wait: Node) -> Node:
    """Return the node whose results `wait` waits for: the one that begins the collective, or an input of the graph."""
    source = wait.all_input_nodes[0]
    while not is_launch(source) and source.op == "call_function" and source.all_input_nodes:
        source = source.all_input_nodes[0]
    return source


def _is_distributed(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in _COLLECTIVES


# The symbolic sizes of a graph: they are computed from those among its inputs, wherever an operator needs one.


def size_inputs(graph: Graph) -> dict[sympy.Expr, Node]:
    """Return the inputs of a graph that are symbolic sizes, each size once."""
    inputs = [node for node in graph.find_nodes(op="placeholder") if isinstance(node.meta.get("val"), torch.SymInt)]
    return {node.meta["val"].node.expr: node for node in reversed(inputs)}  # of equal ones the first


class Sizes:
    """The nodes of a graph that have symbolic sizes. Sizes that are not there are made from those of the inputs."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._known = size_inputs(graph)

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
