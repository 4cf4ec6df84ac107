"""Which operators can work on a part of the rows at a time, and how.

The rows of a tensor are what a model treats alike, such as the tokens of a batch: one dimension, or several neighbouring ones
whose sizes multiply to the number of rows. That number, as any size, may be symbolic: sizes are equal only if their expressions
are, whatever their values. A rule tells, for one kind of operators, where the rows have to lie in what an
operator takes if they lie at a given place in its result, and how it is called for a part of them. Rules follow from what
operators mean, never from sizes that happen to be equal. An operator without a rule works on all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import sympy
import torch
from torch.fx import Node

from teraio.stages.operators import draws, has_storage, packet_name, tensors_taken

ROWS = object()
"""Stands in the arguments of a part for its number of rows."""

Size: TypeAlias = int | sympy.Expr
Shape: TypeAlias = tuple[Size, ...]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows lie in a tensor: in `count` dimensions from `first` on. In a part of them, they are one dimension."""

    first: int
    count: int = 1

    def __contains__(self, dim: int) -> bool:
        return self.first <= dim < self.first + self.count

    def merged(self, dim: int) -> int:
        """Return the number that dimension `dim`, which is none of theirs, has in a part."""
        return dim if dim < self.first else dim - self.count + 1

    def sizes(self, shape: Sequence[Size], rows: Any) -> list[Any]:
        """Return the shape of a part with `rows` rows."""
        return [*shape[: self.first], rows, *shape[self.first + self.count :]]


@dataclass(frozen=True, slots=True)
class Part:
    """How an operator computes a part of its rows, or what a part of them adds to a sum over all.

    inputs: where the rows lie in the tensors that it takes; the others it takes whole. target, args, kwargs: the call.
    """

    inputs: Mapping[Node, Rows]
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


# Take an operator, the shape of its result, where the rows lie in that (None: it sums over them), their number, and where they
# are known to lie.
_Rule = Callable[[Node, Shape, Rows, Size, Mapping[Node, Rows]], Part | None]
_SumRule = Callable[[Node, Shape, None, Size, Mapping[Node, Rows]], Part | None]


def shape_of(node: Node) -> Shape | None:
    """Return the shape of what `node` returns, of several results that of the first; None if that is no tensor."""
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return tuple(sizes_of(first)) if has_storage(first) else None


def has_several(node: Node) -> bool:
    """Return whether `node` returns several results. Where they have rows, these lie at the same place in all of them."""
    return isinstance(node.meta.get("val"), (tuple, list))


def sizes_of(value: torch.Tensor) -> list[Size]:
    """Return the shape of a tensor; equal sizes are written alike."""
    return [size if isinstance(size, int) else sympy.expand(size.node.expr) for size in value.shape]


def product_of(sizes: Sequence[Size]) -> Size:
    """Return the product of some sizes; equal ones are written alike."""
    product = math.prod(sizes)
    return product if isinstance(product, int) else sympy.expand(product)


def places(shape: Sequence[Size], rows: Size) -> Iterator[Rows]:
    """Yield where `rows` rows can lie in a tensor of this shape, by the number of their dimensions."""
    for count in range(1, len(shape) + 1):
        for first in range(len(shape) - count + 1):
            if product_of(shape[first : first + count]) == rows:
                yield Rows(first, count)


def part_of(node: Node, out: Rows | None, rows: Size, known: Mapping[Node, Rows]) -> Part | None:
    """Return how `node` computes a part of its rows; None if no rule says that it can.

    out: where the rows lie in its result; None: it sums over them. known: where they lie in other values; the part agrees.
    """
    target, name, shape = node.target, packet_name(node), shape_of(node)
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable or draws(node) or shape is None:
        return None
    if out is None:
        part = _SUMS[name](node, shape, out, rows, known) if name in _SUMS else None
    else:
        rule = _pointwise if torch.Tag.pointwise in target.tags or name in _POINTWISE else _RULES.get(name)
        part = rule(node, shape, out, rows, known) if rule is not None else None
    if part is None or any(part.inputs.get(each) != known[each] for each in tensors_taken(node) if each in known):
        return None
    return part if all(there in places(shape_of(source) or (), rows) for source, there in part.inputs.items()) else None


# Each element from those at the same place; what is of size 1 there stands for all.
_POINTWISE = frozenset("_to_copy clone detach alias zeros_like ones_like full_like convert_element_type expand".split())


def _pointwise(node: Node, shape: Shape, out: Rows, rows: Size, known: Mapping[Node, Rows]) -> Part | None:
    """Follow the rules of broadcasting, of `expand` too; not where they cannot tell rows apart."""
    inputs: dict[Node, Rows] = {}
    for source in tensors_taken(node):
        own = shape_of(source)
        if own is None:
            return None
        begin = out.first - (len(shape) - len(own))
        there = own[max(begin, 0) : max(begin + out.count, 0)]
        if there and there == shape[out.first : out.first + out.count]:
            inputs[source] = Rows(begin, out.count)
        elif there not in ((), (1,)):
            return None
    args = (node.args[0], out.sizes(shape, ROWS)) if packet_name(node) == "expand" else node.args
    return Part(inputs, node.target, args, node.kwargs)


def _argument(node: Node, name: str) -> tuple[Any, Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Return an argument of `node`, and a function that returns all of them with another value of this one."""
    arguments = cast(torch._ops.OpOverload, node.target)._schema.arguments
    position = next((i for i, each in enumerate(arguments) if each.name == name), None)
    if position is None:
        return None, lambda _: (node.args, dict(node.kwargs))
    if position < len(node.args):
        return node.args[position], lambda new: ((*node.args[:position], new, *node.args[position + 1 :]), dict(node.kwargs))
    given = node.kwargs.get(name, arguments[position].default_value)
    return given, lambda new: (node.args, {**node.kwargs, name: new})


def _along(node: Node, shape: Shape, out: Rows, rows: Size, known: Mapping[Node, Rows]) -> Part | None:
    """Work along one dimension, in which sizes may differ: softmax, its gradient, gather, scatter, slices."""
    dim, with_dim = _argument(node, "dim")
    if not isinstance(dim, int) or dim % len(shape) in out:
        return None
    for source in tensors_taken(node):
        own = shape_of(source)
        if own is None or len(own) != len(shape) or any(own[d] != shape[d] for d in range(len(shape)) if d in out):
            return None
    args, kwargs = with_dim(out.merged(dim % len(shape)))
    return Part(dict.fromkeys(tensors_taken(node), out), node.target, args, kwargs)


def _padded(node: Node, shape: Shape, out: Rows, rows: Size, known: Mapping[Node, Rows]) -> Part | None:
    source, pad, *_ = node.args
    if len(shape) - len(cast(list[int], pad)) // 2 < out.first + out.count:
        return None
    return Part({cast(Node, source): out}, node.target, node.args, node.kwargs)


def _reduced(node: Node, shape: Shape, out: Rows | None, rows: Size, known: Mapping[Node, Rows]) -> Part | None:
    """Reduce some dimensions: the rows are none of them, or are summed over."""
    source = cast(Node, node.args[0])
    count = len(shape_of(source) or ())
    given, with_dims = _argument(node, "dim")
    listed = [given] if isinstance(given, int) else given or range(count)
    dims = {dim % count for dim in listed} if count else set()
    if out is None:
        where = known.get(source)
        possible = where is not None and dims.issuperset(range(where.first, where.first + where.count))
    else:
        keeps = bool(_argument(node, "keepdim")[0])
        left = [dim for dim in range(count) if keeps or dim not in dims]
        where = _neighbours(left[out.first : out.first + out.count])
        possible = where is not None and not any(dim in where for dim in dims)
    if where is None or not possible:
        return None
    reduced = sorted({where.first if dim in where else where.merged(dim) for dim in dims})
    args, kwargs = with_dims(reduced[0] if isinstance(given, int) else reduced)
    return Part({source: where}, node.target, args, kwargs)


def _neighbours(dims: Sequence[int]) -> Rows | None:
    """Return these dimensions; None if others lie between them."""
    return Rows(dims[0], len(dims)) if dims and list(dims) == list(range(dims[0], dims[0] + len(dims))) else None


def _reshaped(node: Node, shape: Shape, out: Rows, rows: Size, known: Mapping[Node, Rows]) -> Part | None:
    """Divide the same elements into other dimensions; the rows stay together."""
    source = cast(Node, node.args[0])
    own = shape_of(source)
    if own is None or source.meta["val"].dtype != node.meta["val"].dtype:  # a view as another type
        return None
    before, after = product_of(shape[: out.first]), product_of(shape[out.first + out.count :])
    possible = [
        where
        for where in places(own, rows)
        if product_of(own[: where.first]) == before and product_of(own[where.first + where.count :]) == after
    ]
    where = known[source] if known.get(source) in possible else next(iter(possible), None)
    return None if where is None else Part({source: where}, aten.view.default, (source, out.sizes(shape, ROWS)))


def _permuted(node: Node, shape: Shape, out: Rows, rows: Size, known: Mapping[Node, Rows]) -> Part | None:
    source = cast(Node, node.args[0])
    dims = list(range(len(shape)))
    if packet_name(node) == "permute":
        order = [dim % len(dims) for dim in cast(list[int], node.args[1])]
    else:
        one, other = cast(tuple[int, int], node.args[1:]) if len(node.args) > 1 else (0, len(dims) - 1)
        dims[one], dims[other] = dims[other], dims[one]
        order = dims
    where = _neighbours(order[out.first : out.first + out.count])
    if where is None:
        return None
    merged = [where.first if dim in where else where.merged(dim) for dim in order if dim not in where or dim == where.first]
    return Part({source: where}, aten.permute.default, (source, merged))


def _filled(node: Node, shape: Shape, out: Rows, rows: Size, known: Mapping[Node, Rows]) -> Part | None:
    return None if tensors_taken(node) else Part({}, node.target, (out.sizes(shape, ROWS), *node.args[1:]), node.kwargs)


def _product(node: Node, shape: Shape, out: Rows | None, rows: Size, known: Mapping[Node, Rows]) -> Part | None:
    """Multiply matrices, of which one has the rows; both have them where the product sums over them."""
    left, right = cast(Sequence[Node], node.args[-2:])
    if left is right or (out is not None and out.count > 1):
        return None
    if packet_name(node) == "addmm":
        added = shape_of(cast(Node, node.args[0]))
        if out != Rows(0) or added is None or (len(added) > 1 and added[0] != 1):  # it is not the same for all rows
            return None
    inputs = {left: Rows(1), right: Rows(0)} if out is None else {left if out == Rows(0) else right: out}
    return Part(inputs, node.target, node.args, node.kwargs)


NO_REDUCTION, MEAN, SUM = range(3)  # of a loss, as PyTorch numbers them


def _class_loss(node: Node, shape: Shape, out: None, rows: Size, known: Mapping[Node, Rows]) -> Part | None:
    """Sum the losses of all rows, and their weights; without a reduction the first result has the losses by rows."""
    scores, target, weight, reduction, *ignored = node.args
    if len(shape_of(cast(Node, scores)) or ()) != 2:
        return None
    inputs = {cast(Node, scores): Rows(0), cast(Node, target): Rows(0)}
    return Part(inputs, node.target, (scores, target, weight, reduction and SUM, *ignored))


def _class_loss_gradient(node: Node, shape: Shape, out: Rows, rows: Size, known: Mapping[Node, Rows]) -> Part | None:
    gradient, scores, target = cast(Sequence[Node], node.args[:3])
    if out != Rows(0) or len(shape_of(scores) or ()) != 2:
        return None
    inputs = {scores: out, target: out} | ({gradient: out} if node.args[4] == NO_REDUCTION else {})
    return Part(inputs, node.target, node.args, node.kwargs)


_RULES: dict[str, _Rule] = {
    **dict.fromkeys("_log_softmax _softmax _log_softmax_backward_data _softmax_backward_data".split(), _along),
    **dict.fromkeys("gather scatter scatter_add slice slice_scatter split split_with_sizes cat".split(), _along),
    **dict.fromkeys("cumsum glu glu_backward".split(), _along),
    **dict.fromkeys("sum mean var_mean amax amin logsumexp any all argmax argmin prod".split(), _reduced),
    **dict.fromkeys("view _unsafe_view unsqueeze squeeze".split(), _reshaped),
    **dict.fromkeys("permute t transpose".split(), _permuted),
    **dict.fromkeys("full zeros ones".split(), _filled),
    **dict.fromkeys("mm addmm".split(), _product),
    "constant_pad_nd": _padded,
    "nll_loss_backward": _class_loss_gradient,
}

_SUMS: dict[str, _SumRule] = {"sum": _reduced, "mm": _product, "nll_loss_forward": _class_loss}
