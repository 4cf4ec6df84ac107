"""Cut stages that need far more memory than the others into pieces that need less: between any two operators.

`cut` cuts before heavy operators only, where a cut costs next to nothing. A long chain of elementwise operators and reductions
over large tensors, such as a loss over a vocabulary or a scan, stays one stage, with all its temporaries. Often that stage alone
sets the smallest budget. At a cut inside it, a compiler has to materialise tensors that it would have fused away. So only those
stages are cut that need far more than usual, only where that lowers what the whole graph needs, and into few pieces. Where the
stages are compiled to fused kernels, what one kernel hands on inside itself needs no memory, so chains are rarely cut there.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.fx import Node

from teraio.stages.kernels import StorageKey, most_at_once, never_materialised, storages_of, tensors_of
from teraio.stages.operators import is_creation, is_getitem, is_view, is_wait, launch_of, storage_bytes, tile_of

_WORTHWHILE = 1.25  # a stage is cut if it needs so many times what the graph will need afterwards
_SLACK = 1.1  # pieces may need so many times what they could, if there are fewer of them then
_MOST_PIECES = 12
_MOST_PLACES = 64


def cut_finer(
    stages: Sequence[Sequence[Node]],
    *,
    far_above: float,
    floor_bytes: int,
    most_stages: int,
    fuses: bool,
    most_bytes: int | None = None,
) -> list[list[Node]]:
    """Return the stages of a graph in order, with those in pieces that need far more memory than the others.

    stages: the operators of each stage, in the order of execution. far_above: how many times the need of the median stage is far
    above it; of one or two stages none is usual, and equal tiles count once. floor_bytes: to need less than this is of no use.
    most_stages: for the result, but for what has to be cut. fuses: the stages are compiled to fused kernels; otherwise each
    operator makes its result.
    most_bytes: what a stage may need at the most: one that needs more is cut in any case, if that does; None: no limit is known.
    """
    keys = storages_of(list(stages[0][0].graph.nodes)) if stages else {}  # also of what other stages wrote, or show a part of
    chains = [_Chain(nodes, keys, fuses=fuses) for nodes in stages]
    needs = [chain.need_bytes(0, len(chain.nodes)) for chain in chains]
    different = [need for need, nodes in zip(needs, stages, strict=True) if (tile := tile_of(nodes[-1])) is None or tile[1] < 1]
    usual = statistics.median(different) if len(different) > 2 else 1
    allowed = math.inf if most_bytes is None else max(most_bytes, floor_bytes)
    limit = min(max(far_above * usual, floor_bytes), allowed)  # one that other stages or graphs need anyway is worth no cut
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
        fits = needs[i] > allowed or len(cut) + len(found) + len(stages) - 1 - i <= most_stages
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
        if self.repeated:
            return self.outlives
        return self.outlives or self.made < begin or self.touched[-1] >= end


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
                    repeated = owner in position and is_creation(owner)
                    size = sum(map(storage_bytes, tensors_of(key, several)))
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
        waits = [(position[launch], i) for i, n in enumerate(self.nodes) if is_wait(n) and (launch := launch_of(n)) in position]
        in_flight = {i for launch, wait in waits for i in range(launch + 1, wait + 1)}
        allowed = [
            i
            for i, n in enumerate(self.nodes)
            if i and i not in in_flight and not (is_getitem(n) or is_view(n) or is_creation(n))
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
