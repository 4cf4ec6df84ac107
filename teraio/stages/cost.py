"""Estimate the seconds of a graph node from its floating-point operations and the bytes that it reads and writes.

They decide where graphs are cut and how stages are named. Measured times replace the estimates.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeGuard, cast

import sympy
import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from teraio.stages.random_state import unwrapped
from teraio.stages.speed import Speed

_log = logging.getLogger("teraio")

_VIEW_NAMES = frozenset(
    "view reshape _unsafe_view permute t transpose unsqueeze squeeze expand slice select as_strided alias detach "
    "unbind split split_with_sizes diagonal unfold wait_tensor".split()
)
_CREATION_NAMES = frozenset("full scalar_tensor iota arange zeros ones empty".split())


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


Symbols = Mapping[Any, int]
"""Values of symbolic sizes (sympy symbols). A missing value is replaced by the hint from compilation."""


def storage_bytes(tensor: torch.Tensor, symbols: Symbols = MappingProxyType({})) -> int:
    """Return the bytes of the smallest storage that holds `tensor`, from its storage offset on."""
    sizes = [_number(s, symbols) for s in tensor.shape]
    strides = [_number(s, symbols) for s in tensor.stride()]
    if 0 in sizes:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return (last + 1) * tensor.element_size()


def output_bytes(node: Node, symbols: Symbols = MappingProxyType({})) -> int:
    """Return the bytes of all tensors that `node` returns. Symbolic sizes without a value count with their hint."""
    return sum(storage_bytes(t, symbols) for t in fake_tensors(node.meta.get("val")))


def _number(size: int | torch.SymInt, symbols: Symbols = MappingProxyType({})) -> int:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    if symbols and expression.free_symbols <= symbols.keys():
        return int(expression.xreplace({s: sympy.Integer(symbols[s]) for s in expression.free_symbols}))
    return int(size.node.hint if size.node.hint is not None else 1)


def symbol_values(placeholders: Sequence[Node], arguments: Sequence[Any]) -> dict[Any, int]:
    """Return the values of the symbols that are themselves sizes of a graph's inputs, from the arguments of one call."""
    values: dict[Any, int] = {}
    for node, argument in zip(placeholders, arguments, strict=True):
        fake = node.meta.get("val")
        pairs: list[tuple[Any, Any]] = [(fake, argument)]
        if has_storage(fake) and has_storage(argument):
            pairs = list(zip((*fake.shape, *fake.stride()), (*argument.shape, *argument.stride()), strict=True))
        for symbolic, actual in pairs:
            if isinstance(symbolic, torch.SymInt) and symbolic.node.expr.is_Symbol:
                values[symbolic.node.expr] = int(actual)
    return values


def is_size(node: Node) -> bool:
    """Return whether `node` computes a symbolic size from symbolic sizes."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def packet_name(node: Node) -> str:
    """Return the base name of the operator (`mm` for `aten.mm.default`), or "" if the target is no operator."""
    return _base_name(node.target) if isinstance(node.target, torch._ops.OpOverload) else ""


def _base_name(operator: torch._ops.OpOverload) -> str:
    return operator._schema.name.split("::")[1]


def is_view(node: Node) -> bool:
    """Return whether the result shares the storage of the input and costs nothing."""
    return packet_name(node) in _VIEW_NAMES


def is_getitem(node: Node) -> bool:
    """Return whether `node` takes one of several results of an operator."""
    return node.target is operator.getitem


def is_creation(node: Node) -> bool:
    """Return whether `node` makes a constant without tensor inputs, which is cheap enough to be repeated where it is used."""
    return packet_name(node) in _CREATION_NAMES and not node.all_input_nodes


def flops(node: Node) -> float:
    """Return the floating-point operations of a matmul, a convolution or attention; 0 for every other node."""
    target, arguments, named = unwrapped(node)
    if not isinstance(target, torch._ops.OpOverload) or not (_is_attention(target) or target._overloadpacket in flop_registry):
        return 0.0
    args, kwargs = torch.fx.node.map_arg((tuple(arguments), dict(named)), _value)
    return operator_flops(target, cast(Any, args), cast(Any, kwargs), node.meta.get("val"))


def operator_flops(target: torch._ops.OpOverload, arguments: Sequence[Any], named: Mapping[str, Any], result: Any) -> float:
    """Return the floating-point operations of one call of an operator. arguments, named, result: fake tensors, and others.

    PyTorch has formulas for them. Attention is counted here: its formulas in PyTorch 2.11 refuse fewer heads of keys than of
    queries, and do not know the CPU's kernel. An operator whose formula fails counts two operations for each element of its
    results, so that it still has arithmetic.
    """
    if _is_attention(target):
        return _attention_flops(_base_name(target), arguments)
    formula = flop_registry.get(target._overloadpacket)
    if formula is None:
        return 0.0
    try:
        return float(_number(cast(Any, formula)(*arguments, **named, out_val=result)))
    except Exception as error:  # an estimate must not stop training, and formulas fail in ways of their own
        _log.debug("PyTorch cannot count the operations of %s: %r", target, error)
        return 2.0 * sum(_number(t.numel()) for t in fake_tensors(result))


def _is_attention(target: torch._ops.OpOverload) -> bool:
    return _base_name(target).startswith("_scaled_dot_product")


def _attention_flops(name: str, arguments: Sequence[Any]) -> float:
    """Return the operations of fused attention. Each query head meets all keys: scores, and their product with the values.

    The backward pass has the gradient of the results as its first argument. It makes the scores again, and four products.
    """
    backward = "backward" in name
    query, key = arguments[backward : backward + 2]
    forward = 4.0 * math.prod(_number(s) for s in query.shape) * _number(key.shape[-2])
    return 2.5 * forward if backward else forward


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, Node) else argument


def seconds(node: Node, speed: Speed) -> float:
    """Return the estimated duration of `node`, by a simple roofline model."""
    if node.op != "call_function" or is_view(node) or is_getitem(node):
        return 0.0
    touched = output_bytes(node) + sum(output_bytes(n) for n in node.all_input_nodes)
    rate = speed.short_flops_per_second if _is_short(node) else speed.flops_per_second
    return max(flops(node) / rate, touched / speed.bytes_per_second)


def _is_short(node: Node) -> bool:
    """Return whether the first input with floating-point numbers has 16 bits or less for each."""
    tensors = (tensor for source in node.all_input_nodes for tensor in fake_tensors(source.meta.get("val")))
    return next((tensor.element_size() <= 2 for tensor in tensors if tensor.dtype.is_floating_point), False)
