"""Which recompute groups can run again and where, and sets of them that are worth a try."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise

from planner.problem.recompute import made_bytes
from planner.schema import Recompute, RecomputeGroup, Trace

__all__ = ["RerunPlaces", "by_kind", "layer_of", "over_half", "rounded", "simple_sets", "whole_layers"]

# An index, and each index further inside, with or without a name before it, as long as there is something inside it.
_LAYER = re.compile(r"(.*?[./]\d+(?:(?:\.[^.\d{:][^.{:]*)?\.\d+(?=\.[^.]))*)(?:[./:]|$)")


class RerunPlaces:
    """Where groups run again: as late as they can, so that what they make takes room for the shortest time.

    `usable`: the groups (ids) that can run again at their first use in the backward pass.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.alone: dict[int, int] = {}
        """The place of each group if no other one runs again, by id."""
        for group in trace.recompute:
            place = self._first_use(group)
            if place is not None and self._unchanged(group, place):
                self.alone[group.id] = place

    @property
    def usable(self) -> Collection[int]:
        """Return the ids of the groups that can run again, ascending."""
        return self.alone.keys()

    def of(self, groups: Collection[int]) -> tuple[Recompute, ...]:
        """Return the groups (ids) with their places, in the order in which they run.

        A group runs at the first use of its blocks in the backward pass: by a backward stage, or by a group of `groups` that
        reads them. Groups that cannot run again are left out.
        """
        trace, place = self._trace, dict[int, int]()
        wanted: dict[int, int] = {}  # by block, the first place of a group that reads it
        for group in sorted((trace.recompute[number] for number in set(groups)), key=lambda group: -group.stage):
            if group.id not in self.alone:
                continue
            at = min([self.alone[group.id], *(wanted[block] for block in group.blocks if block in wanted)])
            place[group.id] = at
            for block in group.reads:
                wanted[block] = min(at, wanted.get(block, at))
        return self.in_order(place)

    def in_order(self, places: Mapping[int, int]) -> tuple[Recompute, ...]:
        """Return groups (ids) with given places. Those with one place run in the order of their stages."""
        ordered = sorted(places, key=lambda number: (places[number], self._trace.recompute[number].stage))
        return tuple(Recompute(group=number, at=places[number]) for number in ordered)

    def options(self, number: int) -> tuple[int, ...]:
        """Return the backward stages that use a block of a group (id) after an idle time: places that may pay, ascending."""
        group, found = self._trace.recompute[number], set()
        for block in (self._trace.blocks[number] for number in group.blocks):
            for after, before in pairwise(block.uses):
                if before > after + 1 and self._trace.stages[before].phase == "backward" and self._unchanged(group, before):
                    found.add(before)
        return tuple(sorted(found))

    def together(self) -> Iterator[tuple[Recompute, ...]]:
        """Yield, for each backward stage, all groups that can run again there and make what is used from there on."""
        for stage in self._trace.stages:
            if stage.phase == "backward":
                groups = (self._trace.recompute[number] for number in self.alone)
                found = [each.id for each in groups if self._used_from(each, stage.id) and self._unchanged(each, stage.id)]
                if found:
                    yield self.in_order(dict.fromkeys(found, stage.id))

    def _used_from(self, group: RecomputeGroup, stage: int) -> bool:
        return any(self._trace.blocks[block].uses[-1] >= stage for block in group.blocks)

    def _first_use(self, group: RecomputeGroup) -> int | None:
        uses = [use for number in group.blocks for use in self._trace.blocks[number].uses if use > group.stage]
        return min((use for use in uses if self._trace.stages[use].phase == "backward"), default=None)

    def _unchanged(self, group: RecomputeGroup, place: int) -> bool:
        blocks = (self._trace.blocks[number] for number in (*group.reads, *group.blocks))
        return not any(group.stage < write < place for block in blocks for write in block.writes)


def layer_of(name: str) -> str | None:
    """Return the beginning of a stage's name that is its layer's; None if it is in no layer.

    It ends with the first index (`forward/layers.3` for `forward/layers.3.mlp.up`). Layers right inside a layer count by
    themselves: `stages.0.blocks.3` for `stages.0.blocks.3.mlp.fc1`. A module without modules inside it is no layer there, such
    as a part of a sequence: `layers.3` for `layers.3.mlp.0`.
    """
    found = _LAYER.match(name)
    return found[1] if found is not None else None


def rounded(trace: Trace, shares: Mapping[int, float]) -> frozenset[int]:
    """Return whole groups, so that up to any stage about as many of each kind run again as `shares` (by group) say."""
    chosen = set()
    carried: dict[str, float] = {}
    for group in trace.recompute:
        kind = _kind(trace, group.id)
        carried[kind] = carried.get(kind, 0.0) + shares.get(group.id, 0.0)
        if carried[kind] >= 0.5:
            carried[kind] -= 1.0
            chosen.add(group.id)
    return frozenset(chosen)


def over_half(shares: Mapping[int, float]) -> frozenset[int]:
    """Return the groups with a share of more than a half."""
    return frozenset(group for group, share in shares.items() if share > 0.5)


def simple_sets(trace: Trace, usable: Collection[int]) -> Iterator[frozenset[int]]:
    """Yield sets of `usable` groups that do not depend on budgets and rates: all, whole layers and spans of them, some kinds."""
    if not usable:
        return
    yield frozenset(usable)
    span = 1
    while span < 2 * len(usable):
        yield whole_layers(trace, usable, span=span)
        span *= 2
    yield from by_kind(trace, usable)


def by_kind(trace: Trace, usable: Collection[int]) -> Iterator[frozenset[int]]:
    """Yield sets of `usable` groups, each with one kind more: the one that makes the most bytes per second of those left."""
    kinds: dict[str, list[int]] = {}
    for group in usable:
        kinds.setdefault(_kind(trace, group), []).append(group)

    def seconds_per_byte(kind: str) -> float:
        groups = [trace.recompute[number] for number in kinds[kind]]
        size = sum(made_bytes(trace, group) for group in groups)
        return sum(group.duration_seconds for group in groups) / max(size, 1)

    chosen: frozenset[int] = frozenset()
    for kind in sorted(kinds, key=seconds_per_byte):
        chosen |= set(kinds[kind])
        yield chosen


def whole_layers(trace: Trace, usable: Collection[int], *, span: int = 1) -> frozenset[int]:
    """Return the `usable` groups of all layers, but for those that make what the next layer reads.

    That is what checkpoints of every layer recompute. A layer is a run of forward stages whose names begin alike, see
    `layer_of`; other stages are no layer. span: keep only what every `span`-th layer hands on.
    """
    numbers, count = _layers(trace)
    readers: dict[int, list[int]] = {}
    for block in trace.blocks:
        readers[block.id] = [use for use in block.reads if trace.stages[use].phase == "forward"]

    def hands_on(group: int) -> bool:
        own = numbers[trace.recompute[group].stage]
        return any(numbers[use] != own for block in trace.recompute[group].blocks for use in readers[block])

    found = set()
    for group in usable:
        layer = numbers[trace.recompute[group].stage]
        if layer is not None and (not hands_on(group) or ((layer + 1) % span and layer + 1 < count)):
            found.add(group)
    return frozenset(found)


def _layers(trace: Trace) -> tuple[list[int | None], int]:
    """The number of each forward stage's layer, from 0; None for other stages. And how many layers there are."""
    found: list[int | None] = []
    last, count = "", 0
    for stage in trace.stages:
        layer = layer_of(stage.name) if stage.phase == "forward" else None
        if layer is None:
            found.append(None)
            continue
        count += layer != last
        last = layer
        found.append(count - 1)
    return found, count


def _kind(trace: Trace, group: int) -> str:
    """The name of the group's stage without numbers: equal stages of different layers are of one kind."""
    return re.sub(r"\d+", "#", trace.stages[trace.recompute[group].stage].name)
