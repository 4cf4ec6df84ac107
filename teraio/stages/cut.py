"""Decide where a graph is cut into stages: right before matmuls, convolutions and attention, preferably at layer borders.

The compiler materialises the inputs of such an operator in any case, so a cut there hardly costs any fusion. The work of a stage
is counted from the layer border on. So identical layers are cut at the same places and become identical stages. Stages that need
far more memory than the others are then cut anywhere, into pieces that need less.

A long chain of elementwise operators and reductions over large tensors, such as a loss over a vocabulary or a scan, stays one
stage, with all its temporaries. Often that stage alone sets the smallest budget. At a cut inside it, a compiler has to
materialise tensors that it would have fused away. So only those stages are cut that need far more than usual, only where that
lowers what the whole graph needs, and into few pieces. Where the stages are compiled to fused kernels, what one kernel hands on
inside itself needs no memory, so chains are rarely cut there.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
import statistics
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.fx import Graph, Node

from teraio.stages import operators as ops
from teraio.stages.cost import Speed, StorageKey, is_heavy, most_at_once, never_materialised, seconds, storages_of, tensors_of

_STAGES_PER_LAYER = 6
_SMALL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPolicy:
    """How fine a graph is cut.

    shortest_seconds: the least estimated duration of a stage.
    wanted_seconds: the same in a graph that is long enough for `many_stages` such stages.
    max_stages: the most stages of one graph.
    far_above: a stage that needs so many times the memory of the median stage is cut further, where that lowers the floor.
    """

    shortest_seconds: float = 1e-3
    wanted_seconds: float = 0.0
    many_stages: int = 32
    max_stages: int = 192
    far_above: float = 3.0

    def shortest(self, graph_seconds: float) -> float:
        """Return the least duration of a stage of a graph that takes so long."""
        wanted = min(self.wanted_seconds, graph_seconds / self.many_stages)
        return max(self.shortest_seconds, wanted, graph_seconds / self.max_stages)


# The host takes some 0.1 ms for each stage, while the GPU works: its stages are packed until they are much longer than that.
GPU_POLICY = CutPolicy(shortest_seconds=5e-4, wanted_seconds=2e-3)


def module_path(node: Node) -> str:
    """Return the module of `node` (`layers.3.attn`), or "" if unknown. A backward node has the module of its forward node."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    raw = next(reversed(stack.values()))[0]
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", str(raw))
    parts = [p for p in path.split(".") if p not in ("L", "self", "s", "_modules", "__dict__", "_orig_mod")]
    return ".".join(parts)


def layer_of(path: str, lists: Container[str] | None = None) -> str:
    """Return the repeated layer of a module path: up to its first index (`layers.3` for `layers.3.mlp.up`).

    Layers right inside a layer count by themselves: `stages.0.blocks.3` for `stages.0.blocks.3.mlp.fc1`. lists: paths of the
    lists whose items are such layers (`stages.0.blocks`); default: all.
    """
    parts = path.split(".")
    end = _end_of_layer(parts)
    for inner in _ends_inside(parts, end):
        if lists is not None and ".".join(parts[: inner - 1]) not in lists:
            break
        end = inner
    return ".".join(parts[:end])


def _end_of_layer(parts: Sequence[str]) -> int:
    return next((position + 1 for position, part in enumerate(parts) if part.isdigit()), 1)


def _ends_inside(parts: Sequence[str], end: int) -> Iterator[int]:
    """Yield where the items end that are right inside the layer that ends at `end`, right inside such an item, and so on."""
    while end > 1 and end + 1 < len(parts) and not parts[end].isdigit() and parts[end + 1].isdigit():
        end += 2
        yield end


def _lists_of_layers(paths: Iterable[str]) -> set[str]:
    """Return the lists of modules right inside layers whose items are layers: they have modules of their own, or are many.

    paths: of the modules that do the work.
    """
    # The few steps of an `nn.Sequential`, as in many an MLP, are parts of the layer around it.
    items: dict[str, set[str]] = {}
    found = set()
    for path in paths:
        parts = path.split(".")
        for end in _ends_inside(parts, _end_of_layer(parts)):
            name = ".".join(parts[: end - 1])
            items.setdefault(name, set()).add(parts[end - 1])
            if end < len(parts):
                found.add(name)
    return found | {name for name, numbers in items.items() if len(numbers) > _STAGES_PER_LAYER}


def can_cut(graph: Graph) -> str | None:
    """Return None if `graph` can be cut, otherwise the reason why it stays one stage."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator) and not ops.carries_random_state(node):
            return f"it contains the higher-order operator {node.target}"
        if ops.is_read_off(node):
            return f"it computes the size {node.name} from a tensor"
    return None


def assign(
    graph: Graph,
    *,
    speed: Speed,
    policy: CutPolicy,
    floor_bytes: int = 0,
    fuses: bool = False,
    most_bytes: int | None = None,
) -> dict[Node, int]:
    """Return the number of the stage of every operator node of `graph`, ascending in the order of the graph.

    floor_bytes: what other graphs need in any case: stages that need no more are not cut for the sake of memory.
    fuses: the stages are compiled to fused kernels, which need less memory than their operators one by one.
    most_bytes: stages that need more are cut in any case, where that helps; None: no such limit is known.

    Changes `graph` in one respect: constants (`full`, `iota`, ...) are repeated beside their users, so that none crosses a cut.
    """
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    stage_of = _walk(nodes, speed, policy)
    _hoist_small(nodes, stage_of)
    _hoist_returned_views(nodes, stage_of)
    # A stage of the shortest duration touches so much in any case: to cut it for the sake of less memory gains nothing.
    usual_bytes = int(policy.shortest_seconds * speed.bytes_per_second)
    in_order = sorted(nodes, key=stage_of.__getitem__)
    whole = [list(stage) for _, stage in itertools.groupby(in_order, stage_of.__getitem__)]
    for number, piece in enumerate(_cut_finer(whole, policy, max(floor_bytes, usual_bytes), most_bytes, fuses=fuses)):
        stage_of.update(dict.fromkeys(piece, number))
    _hoist_returned_views(nodes, stage_of)  # those of a stage that is in pieces now
    _sink_updates(stage_of)
    _repeat_constants(graph, stage_of)
    _set_seeds_apart(stage_of)
    return stage_of


def _set_seeds_apart(stage_of: dict[Node, int]) -> None:
    """Give the operator that draws the seeds of Inductor's random numbers a stage of its own, the first one."""
    # The stages that use the seeds may run again then, and this one never does.
    for node in stage_of:
        if ops.draws_seeds(node):
            stage_of[node] = min(stage_of.values()) - 1
        elif ops.draws(node):  # the order in which numbers are drawn must not change
            return


def _walk(nodes: list[Node], speed: Speed, policy: CutPolicy) -> dict[Node, int]:
    heavy = {n for n in nodes if is_heavy(n)}
    lists = _lists_of_layers(module_path(node) for node in heavy)
    layer_of_node = {node: layer_of(module_path(node), lists) for node in nodes}
    node_seconds = {node: seconds(node, speed) for node in nodes}
    layer_seconds: dict[str, float] = {}
    for node, layer in layer_of_node.items():
        layer_seconds[layer] = layer_seconds.get(layer, 0.0) + node_seconds[node]
    shortest = policy.shortest(sum(node_seconds.values()))
    stage_of: dict[Node, int] = {}
    current, since_cut, layer = 0, 0.0, ""
    for index, node in enumerate(nodes):
        if index and ops.tile_of(node) != ops.tile_of(nodes[index - 1]):  # equal tiles become equal stages
            current, since_cut = current + 1, 0.0
        if node in heavy:
            here = layer_of_node[node] or layer
            # Where no module is known, one layer cannot be told from the next: such a graph may hold many.
            new_layer = here != layer or not here
            wanted = shortest if new_layer else max(shortest, layer_seconds.get(here, 0.0) / _STAGES_PER_LAYER)
            if since_cut >= wanted:
                current += 1
                since_cut = 0.0  # what is taken back takes no time
                _take_back_views(nodes, index, stage_of, current)
            layer = here
        stage_of[node] = current
        since_cut += node_seconds[node]
    return stage_of


def _take_back_views(nodes: list[Node], index: int, stage_of: dict[Node, int], stage: int) -> None:
    """Move the views and constants right before position `index` into `stage`."""
    # Else what they view crosses the cut as well.
    tile = ops.tile_of(nodes[index])
    for node in reversed(nodes[:index]):
        if not (ops.is_view(node) or ops.is_creation(node) or ops.is_getitem(node)) or ops.tile_of(node) != tile:
            break
        stage_of[node] = stage


def _hoist_small(nodes: list[Node], stage_of: dict[Node, int]) -> None:
    """Move cheap nodes with small results (bias gradients, statistics) into the stage that computed their input."""
    # There they fuse with the producer of the input, and the large input need not be kept or read again.
    for node in nodes:
        if ops.is_getitem(node):
            stage_of[node] = stage_of[node.all_input_nodes[0]]
            continue
        if ops.is_wait(node):  # collectives stay where they are launched, see [Note: Collectives]
            stage_of[node] = stage_of.get(ops.launch_of(node), stage_of[node])
            continue
        source = max((stage_of[n] for n in node.all_input_nodes if n in stage_of), default=stage_of[node])
        if source >= stage_of[node] or not _only_computes(node) or ops.draws(node):
            continue
        # Else the small masks of all layers would gather in the stage of the seeds.
        from_seed = ops.uses_seed(node) or ops.packet_name(node) == "inductor_lookup_seed"
        if not from_seed and ops.output_bytes(node) < _SMALL_BYTES:
            stage_of[node] = source


def _only_computes(node: Node) -> bool:
    """Return whether `node` is a cheap operator of PyTorch that writes nothing and is no collective: it may run elsewhere."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable or is_heavy(node):
        return False
    return not (ops.is_launch(node) or ops.is_wait(node))  # which must keep their order, see [Note: Collectives]


def _hoist_returned_views(nodes: list[Node], stage_of: dict[Node, int]) -> None:
    """Move views that only the graph's caller takes into the stage that makes, or first reads, what they show."""
    # PyTorch puts views that it saves for the backward pass (`x.t()` of `x @ weight`, heads of attention) at the end of the
    # forward graph. The last stage would need what all layers save at once.
    returned: dict[Node, None] = {}
    for node in reversed(nodes):
        if ops.is_view(node) and all(user.op == "output" or user in returned for user in node.users):
            returned[node] = None
    for node in reversed(returned):
        shown, *sizes = node.all_input_nodes
        readers = [stage_of[user] for user in shown.users if user in stage_of and user not in returned]
        made = stage_of[shown] if shown in stage_of else min(readers, default=stage_of[node])
        stage_of[node] = max([made, *(stage_of[size] for size in sizes if size in stage_of)])


def _sink_updates(stage_of: dict[Node, int]) -> None:
    """Move what only computes new values of small inputs that the graph changes, such as the running statistics of batch norm,
    into the stage that writes them.
    """
    # The stages that it came from may run again then: they neither read nor write what the graph changes.
    sunk: dict[Node, int] = {}
    for node in reversed(stage_of):  # from users to what they use
        if _writes_an_input(node):
            sunk[node] = stage_of[node]
        elif node.users and all(user in sunk for user in node.users) and _only_computes(node):
            if all(ops.output_bytes(each) < _SMALL_BYTES for each in (node, *node.all_input_nodes)):
                sunk[node] = min(sunk[user] for user in node.users)
    stage_of.update(sunk)


def _writes_an_input(node: Node) -> bool:
    target = node.args[0] if node.args else None
    return ops.packet_name(node) == "copy_" and isinstance(target, Node) and target.op == "placeholder" and not node.users


def _repeat_constants(graph: Graph, stage_of: dict[Node, int]) -> None:
    for node in [n for n in stage_of if ops.is_creation(n)]:
        by_stage: dict[int, list[Node]] = {}
        for user in node.users:
            if user in stage_of:
                by_stage.setdefault(stage_of[user], []).append(user)
        if any(user not in stage_of for user in node.users):  # the graph returns it: the original stays where it is
            by_stage.pop(stage_of[node], None)
        elif by_stage:
            stage_of[node] = min(by_stage)
            by_stage.pop(min(by_stage))
        for stage, users in by_stage.items():
            with graph.inserting_after(node):
                copy = graph.node_copy(node)
            stage_of[copy] = stage
            for user in users:
                user.replace_input_with(node, copy)


# -- stages that need far more memory than the others, in pieces

_WORTHWHILE = 1.25  # a stage is cut if it needs so many times what the graph will need afterwards
_SLACK = 1.1  # pieces may need so many times what they could, if there are fewer of them then
_MOST_PIECES = 12
_MOST_PLACES = 64


def _cut_finer(
    stages: Sequence[Sequence[Node]], policy: CutPolicy, floor_bytes: int, most_bytes: int | None, *, fuses: bool
) -> list[list[Node]]:
    """Return the stages of a graph in order, with those in pieces that need far more memory than the others.

    stages: the operators of each stage, in the order of execution. Of one or two the need of none is usual, and equal tiles count
    once. floor_bytes: to need less than this is of no use.
    most_bytes: what a stage may need at the most: one that needs more is cut in any case, if that does; None: no limit is known.
    """
    keys = storages_of(list(stages[0][0].graph.nodes)) if stages else {}  # also of what other stages wrote, or show a part of
    chains = [_Chain(nodes, keys, fuses=fuses) for nodes in stages]
    needs = [chain.need_bytes(0, len(chain.nodes)) for chain in chains]
    tiles = (ops.tile_of(nodes[-1]) for nodes in stages)
    different = [need for need, tile in zip(needs, tiles, strict=True) if tile is None or tile[1] < 1]
    usual = statistics.median(different) if len(different) > 2 else 1
    allowed = math.inf if most_bytes is None else max(most_bytes, floor_bytes)
    # One that other stages or graphs need anyway is worth no cut.
    limit = min(max(policy.far_above * usual, floor_bytes), allowed)
    known: dict[object, _Pieces] = {}  # layers, and tiles, are alike
    pieces: dict[int, _Pieces] = {}
    floor: float = floor_bytes
    for i in sorted(range(len(chains)), key=needs.__getitem__, reverse=True):
        if needs[i] <= limit or (needs[i] < _WORTHWHILE * floor and not floor <= allowed < needs[i]):
            floor = max(floor, min(needs[i], limit))
            break
        if chains[i].key not in known:
            known[chains[i].key] = _Pieces(chains[i])
        pieces[i] = known[chains[i].key]
        floor = max(floor, pieces[i].least_bytes)
    cut: list[list[Node]] = []
    for i, nodes in enumerate(stages):
        found = [list(nodes)]
        if i in pieces and (needs[i] >= _WORTHWHILE * floor or floor <= allowed < needs[i]):
            ends = pieces[i].within(max(floor, min(_SLACK * floor, allowed)))
            found = [list(nodes[begin:end]) for begin, end in itertools.pairwise(ends)]
        # Stages cost the host time, so a graph has only so many: of what could run, the rest stays whole.
        fits = needs[i] > allowed or len(cut) + len(found) + len(stages) - 1 - i <= policy.max_stages
        cut += found if fits else [list(nodes)]
    return cut


@dataclass(slots=True)
class _Storage:
    """A storage that a chain touches. made: the position of its operator; -1 if it comes from outside.

    touched: the positions that make, read or write it. outlives: whether it is needed after the chain.
    repeated: whether each piece makes it anew, because it is a constant. fused: see `never_materialised`.
    """

    size_bytes: int
    made: int
    touched: list[int]
    outlives: bool
    repeated: bool
    fused: bool = False

    def crosses(self, begin: int, end: int) -> bool:
        """Return whether it is an input or an output of the operators from `begin` to before `end`."""
        return self.outlives or (not self.repeated and (self.made < begin or self.touched[-1] >= end))


class _Chain:
    """The operators of one stage, and what any run of consecutive ones among them needs."""

    def __init__(self, nodes: Sequence[Node], keys: Mapping[Node, StorageKey], *, fuses: bool) -> None:
        """keys: the storages of all nodes of the graph."""
        self.nodes = nodes
        position = {node: i for i, node in enumerate(nodes)}
        several = [key for key in set(keys.values()) if key[1]]
        found: dict[StorageKey, _Storage] = {}
        for i, node in enumerate(nodes):
            for touched in (*node.all_input_nodes, node):
                key = keys[touched]
                if key not in found:
                    owner = key[0]
                    repeated = owner in position and ops.is_creation(owner)
                    size = sum(map(ops.storage_bytes, tensors_of(key, several)))
                    found[key] = _Storage(size, position.get(owner, -1), [], False, repeated)
                if touched is not node or not found[key].repeated:
                    found[key].touched.append(i)
            if any(user not in position for user in node.users):
                found[keys[node]].outlives = True
        self._storages = [storage for storage in found.values() if storage.size_bytes and storage.touched]
        if fuses:
            for key in never_materialised(nodes, keys) & found.keys():
                found[key].fused = True

    def need_bytes(self, begin: int, end: int) -> int:
        """Return the bytes of inputs, outputs and temporaries of the operators from `begin` to before `end`, as one stage."""
        crossing = 0
        inside: list[tuple[int, int, int]] = []
        for storage in self._storages:
            here = [i for i in storage.touched if begin <= i < end]
            if not here:
                continue
            if storage.crosses(begin, end):
                crossing += storage.size_bytes
            elif not storage.fused:
                inside.append((storage.size_bytes, here[0], here[-1]))
        return crossing + most_at_once(inside)

    @cached_property
    def key(self) -> Hashable:
        """Equal for chains that are cut alike."""
        return tuple((s.size_bytes, s.made, *s.touched, s.outlives, s.repeated, s.fused) for s in self._storages), self.places

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Positions before which the chain can be cut, at most `_MOST_PLACES`: those that little memory crosses.

        No collective is in flight there, see [Note: Collectives].
        """
        crossing = [0] * len(self.nodes)
        for storage in self._storages:
            if not storage.repeated:
                for i in range(storage.made + 1, storage.touched[-1] + 1):
                    crossing[i] += storage.size_bytes
        position = {node: i for i, node in enumerate(self.nodes)}
        waits = [
            (position[launch], i) for i, n in enumerate(self.nodes) if ops.is_wait(n) and (launch := ops.launch_of(n)) in position
        ]
        in_flight = {i for launch, wait in waits for i in range(launch + 1, wait + 1)}
        allowed = [
            i
            for i, n in enumerate(self.nodes)
            if i and i not in in_flight and not (ops.is_getitem(n) or ops.is_view(n) or ops.is_creation(n))
        ]
        length = max(1, -(-len(allowed) // _MOST_PLACES))
        groups = (allowed[i : i + length] for i in range(0, len(allowed), length))
        return tuple(min(group, key=crossing.__getitem__) for group in groups)


class _Pieces:
    """The ways to cut a chain into at most `_MOST_PIECES` pieces. least_bytes: what the largest piece needs at the best."""

    def __init__(self, chain: _Chain) -> None:
        self._ends = [0, *chain.places, len(chain.nodes)]
        pairs = itertools.combinations(range(len(self._ends)), 2)
        self._need = {(i, j): chain.need_bytes(self._ends[i], self._ends[j]) for i, j in pairs}
        # The more a piece may need, the fewer pieces do: so the least limit is found by bisection.
        limits = sorted(set(self._need.values()))
        self.least_bytes = limits[bisect.bisect_left(limits, True, key=lambda limit: self._cuts(limit) is not None)]

    def within(self, limit_bytes: float) -> list[int]:
        """Return where the fewest pieces end of which none needs more than the limit, which is not below `least_bytes`."""
        return [self._ends[i] for i in self._cuts(limit_bytes) or (0, len(self._ends) - 1)]

    def _cuts(self, limit_bytes: float) -> list[int] | None:
        """Return the ends of the fewest pieces, of those the ones that need least in all; None if there are too many."""
        best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [0])}
        for j in range(1, len(self._ends)):
            ways = [
                (count + 1, total + self._need[i, j], [*cuts, j])
                for i, (count, total, cuts) in best.items()
                if self._need[i, j] <= limit_bytes
            ]
            if ways:
                best[j] = min(ways)
        count, _, cuts = best.get(len(self._ends) - 1, (_MOST_PIECES + 1, 0, []))
        return cuts if count <= _MOST_PIECES else None
