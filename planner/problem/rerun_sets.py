"""Sets of recompute groups that are worth a try."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from planner.problem.recompute import made_bytes
from planner.schema import Trace

__all__ = ["by_kind", "over_half", "rounded", "simple_sets", "whole_layers"]

# An index, and each index further inside, with or without a name before it, as long as there is something inside it.
_LAYER = re.compile(r"(.*?[./]\d+(?:(?:\.[^.\d{:][^.{:]*)?\.\d+(?=\.[^.]))*)(?:[./:]|$)")


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
