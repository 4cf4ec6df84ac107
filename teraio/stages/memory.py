"""How many bytes a stage reads, creates and needs beside them: estimated from fake tensors, for the sizes of one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch.fx import Node

from runtime.device import MIN_MOVED_BYTES
from runtime.execution import Program
from teraio.stages import cost
from teraio.stages.split import Subgraph
from teraio.stages.temporaries import peak_bytes


def stage_bytes(subgraph: Subgraph, waiting: Sequence[Node], symbols: cost.Symbols) -> dict[str, int]:
    """Return the byte counts of the stage, by their names in `Stage`. Where a symbol is missing, its hint stands in.

    waiting: see `waiting_at`.
    """
    return {
        "input_bytes": distinct_bytes(subgraph.inputs, symbols),
        "output_bytes": sum(cost.storage_bytes(tensor, symbols) for tensor in subgraph.made),
        "workspace_bytes": peak_bytes(subgraph.temporaries, symbols),
        "waiting_bytes": distinct_bytes(small(waiting, symbols), symbols),
    }


def waiting_at(subgraphs: Sequence[Subgraph], returned: Sequence[Node]) -> list[list[Node]]:
    """Return for each stage the values that a stage before it makes and one after it takes, but for what the graph returns."""
    made = {node: number for number, subgraph in enumerate(subgraphs) for node in subgraph.outputs}
    last = {node: number for number, subgraph in enumerate(subgraphs) for node in subgraph.inputs}
    kept = set(returned)
    crossing = [(node, begin, last[node]) for node, begin in made.items() if node in last and node not in kept]
    return [
        [node for node, begin, end in crossing if begin < number < end and node not in subgraph.inputs]
        for number, subgraph in enumerate(subgraphs)
    ]


def is_symbolic(placeholders: Sequence[Node]) -> bool:
    """Return whether one of the nodes is, or has, a symbolic size."""
    for node in placeholders:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        if any(isinstance(size, torch.SymInt) for size in sizes):
            return True
    return False


_MOST_SIZES = 64


class Resizer:
    """Gives a program with symbolic sizes the byte counts of one call's arguments, see `Resize`. Keeps the latest results.

    placeholders, returned: what the graph takes and returns. unmoved: what `small_bytes` counts if it is small. subgraphs: of
    the graph's stages.
    """

    def __init__(self, placeholders: list[Node], returned: list[Node], unmoved: list[Node], subgraphs: list[Subgraph]) -> None:
        self._placeholders = placeholders
        self._returned = returned
        self._unmoved = unmoved
        self._subgraphs = subgraphs
        self._waiting = waiting_at(subgraphs, returned)
        self._known: dict[tuple[int, ...], Program] = {}  # the one that was used last comes last

    def __call__(self, program: Program, arguments: Sequence[Any]) -> Program:
        symbols = cost.symbol_values(self._placeholders, arguments)
        key = tuple(symbols.values())
        resized = self._known.pop(key, None) or self._resized(program, key, symbols)
        self._known[key] = resized
        if len(self._known) > _MOST_SIZES:
            del self._known[next(iter(self._known))]
        return resized

    def alike(self, program: Program, other: Program) -> Program:
        return self._resized(program, tuple(other.sizes.values()), other.sizes)

    def _resized(self, program: Program, key: tuple[int, ...], symbols: cost.Symbols) -> Program:
        stages = tuple(
            replace(stage, **cast(Any, stage_bytes(subgraph, waiting, symbols)))
            for stage, subgraph, waiting in zip(program.stages, self._subgraphs, self._waiting, strict=True)
        )
        return replace(
            program,
            identity=(program.identity, key),
            stages=stages,
            kept_bytes=distinct_bytes(self._returned, symbols),
            small_bytes=distinct_bytes(small(self._unmoved, symbols), symbols),
            sizes=symbols,
        )


def distinct_bytes(nodes: Sequence[Node], symbols: cost.Symbols) -> int:
    """Return the bytes of the storages of `nodes`. A storage that several nodes share counts once."""
    storages: dict[int, int] = {}
    for node in nodes:
        value = node.meta.get("val")
        if cost.has_storage(value):
            key = value.untyped_storage()._cdata
            storages[key] = max(storages.get(key, 0), cost.storage_bytes(value, symbols))
    return sum(storages.values())


def small(nodes: Sequence[Node], symbols: cost.Symbols) -> list[Node]:
    """Return the nodes whose results are too small to move."""
    return [n for n in nodes if cost.output_bytes(n, symbols) < MIN_MOVED_BYTES]
