"""Run what is large in a graph only because it has many rows, as the loss over a vocabulary, in tiles: some rows at a time.

[Note: Tiles]
A stage is never less than one operator, so the scores of a large vocabulary would set the smallest budget alone. Where they
dominate a graph, the operators around them run in tiles of their rows, each tile in stages of its own:
* `mark` decides, on the joint graph of the forward and the backward pass. What is large there is not saved for the backward pass:
  the backward graph computes it again, from the product that begins the region. This is marked with the number of tiles.
* `tile` rewrites each of the two graphs by itself. A region begins with a product that is wider than what it takes. It is what is
  large, what takes it, and what lies between, up to further products. For each tile its operators are repeated for the rows of
  this tile (`rows.py`). Results by rows are written into memory that is made once. Sums over rows, such as the gradient of the
  weight, are added up in place, in 32 bits where they have fewer.
* All tiles but the last, which may be shorter, are equal stages, and are compiled once: slices of what a tile takes are made
  before the first one.
Results by rows are those of the same operators for fewer rows. Sums are added up in another order than without tiles.
Where the number of rows varies, so does that of a tile, but not the number of tiles: each has as many rows as the others, and the
last one has the rest, too. For few rows they may be empty; Inductor excludes that by a guard.
What no rule knows ends a region: its operators run for all rows, as they do without tiles.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import sympy
import torch
from torch._guards import detect_fake_mode
from torch._prims_common import is_contiguous_or_false
from torch.fx import Graph, Node
from torch.utils._sympy.functions import FloorDiv
from torch.utils.checkpoint import CheckpointPolicy

from teraio.stages import operators as ops
from teraio.stages.cost import is_heavy, storages_of
from teraio.stages.cut import module_path
from teraio.stages.rows import MEAN, NO_REDUCTION, ROWS, Part, Rows, Size, has_several, part_of, places, shape_of, sizes_of

_log = logging.getLogger("teraio")

_NOWHERE = Rows(-1)
_TILES = "teraio_tiles"  # of a product that begins a region, in `meta`: the number of tiles, and what it needs without

_LEAST_ROWS = 256  # of a tile: with fewer, matrix products become slow
_MOST_TILES = 64
_LEAST_SHARE = 1 / 8  # of what a region holds in any case, for what follows its rows: with less, hardly anything is gained
_MULTIPLE = 64  # of the rows of a tile: so that slices are aligned
_MOST_LARGE = 64  # bytes of all that is in memory for one number of the product: no region needs more
_MOST_PARTS = 8  # of a sum of products: its temporaries are so much smaller

aten, prims = torch.ops.aten, torch.ops.prims


def marking(*, above_bytes: int, fuses: bool, most_bytes: int | None = None) -> contextlib.AbstractContextManager[object]:
    """Have PyTorch `mark` each graph that it makes within the context, after the passes of the user."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    given = config.joint_custom_post_pass
    before = given if isinstance(given, (list, tuple)) else [] if given is None else [given]

    class Marking(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            for each in before:
                each(graph)
            mark(graph, above_bytes=above_bytes, fuses=fuses, most_bytes=most_bytes)

        def uuid(self) -> Any:  # part of the keys of Inductor's cache
            known = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in before]
            return None if None in known else ["teraio tiles", *known]

    return config.patch(joint_custom_post_pass=Marking())  # type: ignore[no-any-return]


def mark(graph: Graph, *, above_bytes: int, fuses: bool, most_bytes: int | None) -> None:
    """Mark the regions of a joint graph, or of one without a backward pass, that are to run in tiles.

    above_bytes: regions that need less stay whole. fuses: operators are fused, so that few of their results are in memory.
    most_bytes: tiles that need more become smaller, as far as that helps; None: no limit is known.
    """
    forward = _forward(graph)
    taken: set[Node] = set()
    changing = _reads_what_changes(graph)
    identity = 1 + max((node.meta.get("ac_graph_id", 0) for node in graph.nodes), default=0)
    for product in sorted((node for node in forward if ops.packet_name(node) in ("mm", "addmm")), key=_elements, reverse=True):
        widens = _elements(product) > 2 * _elements(cast(Node, product.args[-2]))  # so that what it takes is not large itself
        if product in taken or not widens or _MOST_LARGE * _elements(product) <= above_bytes:
            continue
        region = _region(product, forward)
        if region is None or taken & region.members.keys() or changing & set(region.recomputed):
            continue
        tiles, whole_bytes = region.tiles(above_bytes=above_bytes, fuses=fuses, most_bytes=most_bytes)
        if tiles > 1:
            taken |= region.members.keys()
            product.meta[_TILES] = tiles, whole_bytes
            if any(user.op == "output" for node in region.large for user in node.users):
                what = module_path(product) or "a product"
                _log.info("%s runs in tiles, but the model returns its result, which stays whole", what)
            policies = dict.fromkeys(changing, CheckpointPolicy.MUST_SAVE)
            policies |= dict.fromkeys(region.recomputed, CheckpointPolicy.MUST_RECOMPUTE)
            for node, policy in policies.items():
                if "recompute" not in node.meta:  # the user's own checkpoints hold
                    node.meta.update(recompute=policy, ac_graph_id=identity)


def tile(graph: Graph) -> Iterator[tuple[int, int, list[Node]]]:
    """Have what is marked in a forward or a backward graph run in tiles. Yields each region before it changes `graph` for it: in
    how many tiles it runs, the bytes that it would need at once, by estimate, and its operators.

    All of them have to be taken.
    """
    for product in [node for node in graph.nodes if _TILES in node.meta]:
        region = _region(
            product, dict.fromkeys(node for node in graph.nodes if node.op == "call_function" and not ops.is_size(node))
        )
        rows, columns = product.meta["val"].shape
        if region is None:
            _log.warning("a product of %s x %s stays whole: no rule says how what follows is computed by rows", rows, columns)
            continue
        sizes = ops.Sizes(graph)
        if not all(sizes.has(s) for n in region.members for s in shape_of(n) or () if isinstance(s, sympy.Expr)):
            _log.warning("a product of %s x %s stays whole: the graph does not take all of these sizes", rows, columns)
            continue
        tiles, whole_bytes = product.meta[_TILES]
        tiling = _Tiling(region, tiles)
        yield tiling.count, whole_bytes, list(region.members)
        tiling.write()
        graph.eliminate_dead_code()


def settle(graph: Graph) -> None:
    """Let what waits for writes take the written values themselves: their order is that of the stages by now. Changes `graph`."""
    for node in graph.find_nodes(op="call_function", target=ops.settled):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def _forward(graph: Graph) -> dict[Node, None]:
    """Return the operators of the forward pass, in order: what those results of a joint graph need that need no gradient."""
    backward: set[Node] = set()
    for node in graph.nodes:
        if (node.op == "placeholder" and "tangents" in node.name) or any(each in backward for each in node.all_input_nodes):
            backward.add(node)
    needed = {node for node in graph.output_node().all_input_nodes if node not in backward}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return dict.fromkeys(node for node in graph.nodes if node in needed and node.op == "call_function" and not ops.is_size(node))


def _reads_what_changes(graph: Graph) -> set[Node]:
    """Return what reads inputs that the graph writes in the end, such as buffers: later it would read other values."""
    written = [node.args[0] for node in graph.nodes if ops.packet_name(node) == "copy_"]
    shown = [node for node in written if isinstance(node, Node) and node.op == "placeholder"]
    found: set[Node] = set()
    for node in shown:  # grows meanwhile
        shown += [user for user in node.users if ops.is_view(user)]
        found.update(user for user in node.users if user.op == "call_function" and not ops.is_view(user))
    return found


def _elements(node: Node) -> int:
    """Return how many numbers are in memory for what `node` returns."""
    if shape_of(node) is None or has_several(node):
        return 0
    value: torch.Tensor = node.meta["val"]
    sizes, strides = map(ops.known_size, value.shape), map(ops.known_size, value.stride())
    return math.prod(size for size, stride in zip(sizes, strides, strict=True) if stride)


@dataclass(frozen=True)
class _Region:
    """Operators that can run for a part of the rows. product: the one that it begins with: of large values, the first.

    inside: the operators that may be in it. members: in the order of the graph, how each computes a part; None for what takes
    one of several results. where: where the rows lie in their results; the other members are sums over rows. large: those whose
    results are large because they have all rows.
    """

    product: Node
    rows: Size
    inside: Collection[Node]
    members: Mapping[Node, Part | None]
    where: Mapping[Node, Rows]
    large: Sequence[Node]

    @cached_property
    def exits(self) -> list[Node]:
        """Those whose results others take: operators `inside`, or who runs the graph. Others have constants of their own."""
        return [
            node
            for node in self.members
            if not ops.is_creation(node)
            and any(user not in self.members and (user in self.inside or user.op == "output") for user in node.users)
        ]

    @property
    def is_whole(self) -> bool:
        """Whether its members agree where the rows lie, none needs a sum over all, and its results have a usual layout."""
        agree = all(
            source not in self.members or part.inputs.get(source, _NOWHERE) == self.where.get(source)
            for node, part in self.members.items()
            if part is not None
            for source in ops.tensors_taken(node)
        )
        return agree and all(
            isinstance(v := node.meta.get("val"), torch.Tensor) and is_contiguous_or_false(v) for node in self.exits
        )

    @cached_property
    def _results(self) -> tuple[Mapping[Node, object], set[object]]:
        """The storage of each result, and those that others take."""
        storages = storages_of(list(self.members))
        return storages, {storages[node] for node in self.exits}

    @property
    def recomputed(self) -> list[Node]:
        """What is large and not a result, or the product itself: the backward pass computes it again, in tiles."""
        storages, results = self._results
        return [node for node in self.large if storages[node] not in results - {storages[self.product]}]

    def tiles(self, *, above_bytes: int, fuses: bool, most_bytes: int | None) -> tuple[int, int]:
        """Return into how many tiles it is divided, so many that what follows the number of rows is no longer what counts and
        no more than `most_bytes` are needed; and what it needs at once without.

        1 if that is no more than `above_bytes`, if all that is large is its results, or if tiles need more than half.
        """
        storages, results = self._results
        taken = {source for node in self.members for source in node.all_input_nodes if source not in self.members}
        by_rows = {source for part in self.members.values() if part is not None for source in part.inputs}
        touched = {n for node in self.members if is_heavy(node) for n in (node, *node.all_input_nodes)}
        weights = (touched & taken) - by_rows
        longer = sum(max(4 * _elements(weight) - ops.output_bytes(weight), 0) for weight in weights)  # sums have 32 bits
        taken_bytes = sum(map(ops.output_bytes, taken))
        # What a product makes or takes is in memory, and so is its gradient.
        count = len({storages[node] for node in self.large if node in touched})
        grows = 2 * count * (ops.output_bytes(self.product) if fuses else max(map(ops.output_bytes, self.large)))
        # However few rows a tile has: what the region takes as a whole, with its gradients, and what it gives.
        stays = 2 * taken_bytes + longer + sum(map(ops.output_bytes, self.exits))
        halves = (grows - stays) / 2  # what may grow so that all is half of it
        if grows + stays <= above_bytes or halves <= 0 or all(storages[node] in results for node in self.large):
            return 1, grows + taken_bytes
        room = math.inf if most_bytes is None else max(most_bytes - stays, _LEAST_SHARE * stays)
        wanted = 1 << max(0, math.ceil(math.log2(grows / min(stays, halves, room))))
        found = min(wanted, _MOST_TILES, max(ops.known_size(self.product.meta["val"].shape[0]) // _LEAST_ROWS, 1))
        return found if grows / found <= halves else 1, grows + taken_bytes


def _region(product: Node, inside: Collection[Node]) -> _Region | None:
    """Return the region that begins with `product`, among the operators `inside`; None if it cannot be divided by rows."""
    rows = sizes_of(product.meta["val"])[0]
    spread = _Spread(rows, least=_elements(product) / 2)
    members = {product}
    count = 0
    while count != len(members):
        count = len(members)
        large = {node for node in members if spread.goes_on(node) or node is product}
        for node in inside:
            if node not in members and not any(source in large for source in node.all_input_nodes):
                continue
            if ops.is_getitem(node) or spread.reaches(node):
                members.update([node, *spread.large_sources(node)])  # other operators make some, such as masks
                if spread.goes_on(node):
                    large.add(node)
            elif node in members:
                return None  # what the tiles need is known only when all of them have run
        members |= _between(members, inside)
        members |= {user for node in members if node not in spread.where for user in node.users if ops.is_getitem(user)}
    ordered = {node: spread.parts.get(node) for node in product.graph.nodes if node in members}
    region = _Region(product, rows, inside, ordered, spread.where, [node for node in ordered if spread.is_large(node)])
    return region if region.is_whole else None


class _Spread:
    """Where some rows lie in the values of a graph, as far as that is known by now, and how operators compute a part of them.

    where: lacks sums over rows, which have a part. least: numbers from which on a value is large.
    """

    def __init__(self, rows: Size, least: float) -> None:
        self._rows = rows
        self._least = least
        self.where: dict[Node, Rows] = {}
        self.parts: dict[Node, Part] = {}

    def reaches(self, node: Node) -> bool:
        """Return whether `node` can compute a part of the rows, or of a sum over them, by what is known."""
        shape = shape_of(node)
        possible = () if shape is None else places(shape, self._rows)
        return node in self.parts or any(self._lie(node, out) for out in (*possible, None))

    def _lie(self, node: Node, out: Rows | None) -> bool:
        part = part_of(node, out, self._rows, self.where)
        if part is None:
            return False
        self.parts[node] = part
        if out is None and ops.packet_name(node) == "nll_loss_forward" and node.args[3] == NO_REDUCTION:
            self.where.update((user, Rows(0)) for user in node.users if user.args[1] == 0)
        elif out is not None:
            self.where.update(dict.fromkeys(node.users if has_several(node) else [node], out))
        return True

    def is_large(self, node: Node) -> bool:
        """Return whether the result of `node` is large because it has all rows."""
        return node in self.where and _elements(node) >= self._least

    def goes_on(self, node: Node) -> bool:
        """Return whether a region has the operators that take the result of `node`: it is large, and no further product's."""
        return self.is_large(node) and not (ops.is_creation(node) or is_heavy(node))

    def large_sources(self, node: Node) -> list[Node]:
        """Return those operators with so many elements that `node` takes by rows, and that can compute a part of these."""
        inputs = self.parts[node].inputs if node in self.parts else {}
        return [
            source
            for source, there in inputs.items()
            if source.op == "call_function"
            and _elements(source) >= self._least
            and (self.where.get(source) == there if source in self.parts else self._lie(source, there))
        ]


def _between(members: Collection[Node], inside: Collection[Node]) -> set[Node]:
    """Return the operators on a way from one of the members to another."""
    below = {node for node in members if not ops.is_creation(node)}  # of constants, each region has its own
    above = set(below)
    for node in inside:
        if any(source in below for source in node.all_input_nodes):
            below.add(node)
    for node in reversed(list(inside)):
        if any(user in above for user in node.users):
            above.add(node)
    return below & above


_OWN_META = frozenset(("val", "tensor_meta", "recompute", "ac_graph_id", _TILES))


def _borders(rows: Size, tiles: int) -> list[tuple[Size, Size]]:
    """Return where each tile begins and ends."""
    if isinstance(rows, int):
        each = -(-rows // (tiles * _MULTIPLE)) * _MULTIPLE
        return [(begin, min(begin + each, rows)) for begin in range(0, rows, each)]
    some = FloorDiv(rows, sympy.Integer(tiles))
    return [(number * some, (number + 1) * some if number + 1 < tiles else rows) for number in range(tiles)]


class _Tiling:
    """Writes a region in tiles into its graph, behind its operators, and has others take the results. count: of the tiles."""

    def __init__(self, region: _Region, tiles: int) -> None:
        self._region = region
        self._graph = region.product.graph
        self._borders = _borders(region.rows, tiles)
        self.count = len(self._borders)
        self._sizes, self._first = ops.Sizes(self._graph), next(iter(region.members))
        self._mode = detect_fake_mode([region.product.meta["val"]])
        self._cursor = list(region.members)[-1]
        self._tile: int | None = None
        self._slices: dict[tuple[Node, Rows], list[Node]] = {}
        self._memory: dict[Node, Node] = {}
        self._writes: dict[Node, list[Node]] = {}

    def write(self) -> None:
        """Write what comes before the tiles, the tiles, and what comes after them."""
        self._move_what_follows()
        members, where = self._region.members, self._region.where
        self._tile = -1
        for part in members.values():
            for source, there in part.inputs.items() if part is not None else ():
                if source not in members and (source, there) not in self._slices:
                    self._slices[source, there] = self._sliced(source, there, source)
        targets: dict[Node, list[Node]] = {}
        for node in members:
            if ops.packet_name(node) == "nll_loss_forward":
                self._make_room(node, node.meta["val"][1])
        for node in self._region.exits:
            self._make_room(node, node.meta["val"])
            if node in where:
                targets[node] = self._sliced(self._memory[node], Rows(where[node].first), node)
        for number in range(len(self._borders)):
            self._tile = number
            self._write_tile(number, targets)
        self._tile = None
        for node in self._region.exits:
            node.replace_all_uses_with(self._result(node), delete_user_cb=lambda user: user not in members)

    def _move_what_follows(self) -> None:
        """Move what needs a result of the region, and is between its operators, behind them."""
        below, following = set(self._region.members), list[Node]()
        for node in itertools.takewhile(lambda node: node is not self._cursor, self._graph.nodes):
            if node not in below and any(source in below for source in node.all_input_nodes):
                below.add(node)
                following.append(node)
        for node in reversed(following):
            self._cursor.append(node)

    def _sliced(self, value: Node, there: Rows, like: Node) -> list[Node]:
        """Return the rows of each tile of a value."""
        if there.count > 1:
            shape = cast(tuple[Size, ...], shape_of(value))
            value = self._put(aten.reshape.default, (value, there.sizes(shape, self._region.rows)), like)
        if isinstance(self._region.rows, int):
            return [self._put(aten.slice.Tensor, (value, there.first, begin, end), like) for begin, end in self._borders]
        lengths = [end - begin for begin, end in self._borders]
        parts = self._put(aten.split_with_sizes.default, (value, lengths, there.first), like)
        return [self._put(operator.getitem, (parts, number), like) for number in range(self.count)]

    def _make_room(self, node: Node, value: torch.Tensor) -> None:
        """Make memory for a result: with the rows in one dimension, or for a sum, with 32 bits at least."""
        there = self._region.where.get(node)
        shape = sizes_of(value) if there is None else there.sizes(sizes_of(value), self._region.rows)
        short = there is None and value.dtype.is_floating_point and value.dtype.itemsize < 4
        settings = {"dtype": torch.float32 if short else value.dtype, "device": value.device, "pin_memory": False}
        self._memory[node], self._writes[node] = self._put(aten.full.default, (shape, 0), node, settings), []

    def _write_tile(self, number: int, targets: Mapping[Node, Sequence[Node]]) -> None:
        local: dict[Node, Node] = {}
        for node, part in self._region.members.items():
            if part is None:
                local[node] = self._put(operator.getitem, (local[cast(Node, node.args[0])], node.args[1]), node)
            elif node in self._memory and ops.packet_name(node) == "mm" and node not in targets:
                self._add_products(node, self._arguments(part.args, part, local, number))
                continue
            else:
                args = self._arguments(part.args, part, local, number)
                local[node] = self._put(part.target, args, node, self._arguments(part.kwargs, part, local, number))
            if node in targets:
                self._writes[node].append(self._put(aten.copy_.default, (targets[node][number], local[node]), node))
            elif ops.packet_name(node) == "nll_loss_forward":
                self._add(node, self._memory[node], self._put(operator.getitem, (local[node], 1), node))
            elif node in self._memory:
                self._add(node, self._memory[node], local[node])

    def _arguments(self, given: Any, part: Part, local: Mapping[Node, Node], number: int) -> Any:
        begin, end = self._borders[number]

        def of_tile(leaf: Any) -> Any:
            if leaf is ROWS:
                return end - begin
            if not isinstance(leaf, Node):
                return leaf
            there = part.inputs.get(leaf)
            return local[leaf] if leaf in local else leaf if there is None else self._slices[leaf, there][number]

        return torch.fx.node.map_aggregate(given, of_tile)

    def _add_products(self, node: Node, arguments: tuple[Node, Node]) -> None:
        """Add a product to a sum of such, in parts, so that their temporaries take no more than what is large in the tile."""
        left, right = arguments
        rows = node.meta["val"].shape[0]
        if not isinstance(rows, int):
            self._add(node, self._memory[node], self._put(aten.mm.default, arguments, node))
            return
        parts = min(_MOST_PARTS, -(-_elements(node) * self.count // _elements(self._region.product)))
        step = -(-rows // (parts * _MULTIPLE)) * _MULTIPLE
        for first in range(0, rows, step):
            some = self._put(aten.slice.Tensor, (left, 0, first, min(first + step, rows)), node)
            place = self._put(aten.slice.Tensor, (self._memory[node], 0, first, min(first + step, rows)), node)
            self._add(node, place, self._put(aten.mm.default, (some, right), node))

    def _add(self, node: Node, place: Node, value: Node) -> None:
        if shape_of(value) != shape_of(place):
            value = self._put(aten.view.default, (value, sizes_of(place.meta["val"])), node)
        self._writes[node].append(self._put(aten.add_.Tensor, (place, value), node))

    def _result(self, node: Node) -> Node:
        """Return what takes the place of a result of the region."""
        value, there = node.meta["val"], self._region.where.get(node)
        result = self._put(ops.settled, (self._memory[node], *self._writes[node]), node)
        if there is not None and there.count > 1:
            return self._put(aten.view.default, (result, sizes_of(value)), node)
        if ops.is_getitem(node) and node.args[1] == 0 and (loss := cast(Node, node.args[0])).args[3] == MEAN:
            weights = self._put(ops.settled, (self._memory[loss], *self._writes[loss]), node)
            result = self._put(aten.div.Tensor, (result, weights), node)
        if result.meta["val"].dtype != value.dtype:
            result = self._put(prims.convert_element_type.default, (result, value.dtype), node)
        return result

    def _as_argument(self, leaf: Any) -> Any:
        if not isinstance(leaf, sympy.Expr):
            return leaf
        return int(leaf) if leaf.is_Integer else self._sizes.node(leaf, self._first)

    def _put(self, target: Any, args: tuple[Any, ...], like: Node, kwargs: Mapping[str, Any] | None = None) -> Node:
        """Insert an operator behind the last one. like: the one that it does a part of the work of. Its sizes may be symbolic."""
        args = torch.fx.node.map_aggregate(args, self._as_argument)
        with self._graph.inserting_after(self._cursor):
            self._cursor = node = self._graph.call_function(target, args, dict(kwargs or {}))
        values = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        # Of fake results come no guards on sizes: a tile of any number of rows is computed alike.
        shapes = self._mode.shape_env if self._mode is not None else None
        unguarded = shapes.suppress_guards() if shapes is not None else contextlib.nullcontext()
        with self._mode or contextlib.nullcontext(), torch.no_grad(), unguarded:
            value = target(*values[0], **values[1])
        node.meta = {key: what for key, what in like.meta.items() if key not in _OWN_META} | {"val": value}
        if self._tile is not None:
            node.meta[ops.TILE] = (self._region.product.name, self._tile)
        return node
