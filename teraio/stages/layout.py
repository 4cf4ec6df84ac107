"""Lay a cut graph out as a `Program`: numbered slots, and the bytes of each stage for the sizes of one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from runtime.device import MIN_MOVED_BYTES
from runtime.execution import Constant, Kind, Phase, Program, SizedGraph, Stage, StageFunction
from teraio.stages import operators as ops
from teraio.stages.kernels import storages_of
from teraio.stages.operators import Symbols
from teraio.stages.split import Subgraph, at_peak, peak_bytes


def lay_out(
    gm: GraphModule,
    subgraphs: Sequence[Subgraph],
    functions: Sequence[StageFunction],
    never_again: Sequence[str],
    inputs: Sequence[tuple[str, Kind]],
    *,
    identity: int,
    phase: Phase,
    counted: frozenset[str],
) -> Program:
    """Number the slots.

    functions, never_again: of each subgraph, see `Stage`. counted: names of the values of the forward graph, which its
    `small_bytes` counts.
    """
    prefix = name_of(phase, identity)
    placeholders = gm.graph.find_nodes(op="placeholder")
    output = gm.graph.output_node()
    returned = results_of(gm)
    slots: dict[Node, int] = {n: i for i, n in enumerate(placeholders)}
    uses: dict[int, list[int]] = {}
    for number, subgraph in enumerate(subgraphs):
        for node in subgraph.outputs:
            slots[node] = len(slots)
        for node in (*subgraph.inputs, *subgraph.outputs):
            uses.setdefault(slots[node], []).append(number)
    results = tuple(slots[r] if isinstance(r, Node) else Constant(r) for r in cast(Sequence[Any], output.args[0]))
    kept = {slots[node] for node in returned}
    names = _unique([f"{prefix}/{subgraph.path}" for subgraph in subgraphs])
    unmoved = [n for n in (*placeholders, *returned) if n.name not in counted]
    storages = storages_of(list(gm.graph.nodes))
    owners = [[storages[node][0] for node in subgraph.inputs] for subgraph in subgraphs]
    resizer = Resizer(placeholders, returned, unmoved, subgraphs, owners)
    sizes = _Sizes(_symbol_values(placeholders, [node.meta.get("val") for node in placeholders]))

    def stage(number: int, subgraph: Subgraph) -> Stage:
        touched = [slots[n] for n in (*subgraph.inputs, *subgraph.outputs)]
        return Stage(
            name=names[number],
            phase=phase,
            run=functions[number],
            inputs=tuple(slots[n] for n in subgraph.inputs),
            outputs=tuple(slots[n] for n in subgraph.outputs),
            frees=tuple(s for s in dict.fromkeys(touched) if uses[s][-1] == number and s not in kept),
            next_uses=tuple(next((u for u in uses[s] if u > number), -1) for s in touched),
            **resizer.stage_bytes(number, sizes),
            mutates=tuple(slots[n] for n in subgraph.mutated),
            has_collectives=ops.has_collectives(subgraph.module.graph),
            repeatable=subgraph.repeatable,
            never_again=never_again[number],
            has_class_loss=ops.has_class_loss(subgraph.module.graph),
        )

    parameters = [node for node, (_, kind) in zip(placeholders, inputs, strict=False) if kind == "parameter"]
    return Program(
        identity=identity,
        name=prefix,
        phase=phase,
        stages=tuple(stage(number, subgraph) for number, subgraph in enumerate(subgraphs)),
        input_count=len(placeholders),
        slot_names=(*(name for name, _ in inputs), *(f"{prefix}/{n.name}" for n in list(slots)[len(inputs) :])),
        slot_kinds=(
            *(kind for _, kind in inputs),
            *("gradient" if phase == "backward" and s in kept else "activation" for s in range(len(inputs), len(slots))),
        ),
        results=results,
        user_results=user_results(output, phase),
        **cast(Any, resizer.program_bytes(sizes)),
        small_parameter_bytes=_small_bytes(parameters, sizes),
        resize=resizer if ops.is_symbolic(placeholders) else None,
    )


def name_of(phase: Phase, identity: int) -> str:
    """Return the name of a graph."""
    return phase if identity < 2 else f"{phase}#{identity}"


def results_of(gm: GraphModule) -> list[Node]:
    """Return the nodes that a graph returns, without its constant results."""
    return [result for result in cast(Sequence[Any], gm.graph.output_node().args[0]) if isinstance(result, Node)]


def user_results(output: Node, phase: Phase) -> tuple[int, ...]:
    """Return the positions of the results that user code sees: all of a backward graph, the first ones of a forward graph.

    The other results of a forward graph are saved for the backward graph.
    """
    count = len(cast(Sequence[Any], output.args[0]))
    if phase == "backward":
        return tuple(range(count))
    visible = output.meta.get("user_visible_output_idxs", range(count))
    return tuple(range(max(visible, default=count - 1) + 1))


def _unique(names: list[str]) -> list[str]:
    """Append a number to a name that has occurred before (`forward/root:2`)."""
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name}:{seen[name]}")
    return unique


class _Sizes(dict[Node, tuple[int, int]]):
    """The storage of each node's tensor, and its bytes for some values of the symbols; (0, 0) if it has none. Found once."""

    def __init__(self, symbols: Symbols) -> None:
        super().__init__()
        self.symbols = symbols

    def __missing__(self, node: Node) -> tuple[int, int]:
        value: Any = node.meta.get("val")
        known = (value.untyped_storage()._cdata, ops.storage_bytes(value, self.symbols)) if ops.has_storage(value) else (0, 0)
        self[node] = known
        return known


_MOST_SIZES = 64


@dataclass(eq=False)
class Resizer:
    """The bytes of a program for the sizes of one call, estimated from fake tensors. See `Resize`. Keeps the latest results.

    placeholders, returned: what the graph takes and returns. unmoved: what `small_bytes` counts if it is small. subgraphs: of
    the graph's stages. owners: what makes the storages of their inputs, of which an input may show a part.
    """

    _placeholders: list[Node]
    _returned: list[Node]
    _unmoved: list[Node]
    _subgraphs: Sequence[Subgraph]
    _owners: list[list[Node]]
    _known: dict[tuple[int, ...], Program] = field(init=False, default_factory=dict)  # the one that was used last comes last

    def __post_init__(self) -> None:
        self._waiting = _waiting_at(self._subgraphs, self._returned)

    def __call__(self, program: Program, arguments: Sequence[Any]) -> Program:
        symbols = _symbol_values(self._placeholders, arguments)
        key = tuple(symbols.values())
        resized = self._known.pop(key, None) or self._resized(program, symbols)
        self._known[key] = resized
        if len(self._known) > _MOST_SIZES:
            del self._known[next(iter(self._known))]
        return resized

    def alike(self, program: Program, other: Program) -> Program:
        return self._resized(program, other.sizes)

    def largest(self, program: Program) -> Program:
        return self._resized(program, {})

    def bound(self, most_bytes: int) -> None:
        for subgraph, owners in zip(self._subgraphs, self._owners, strict=True):
            taken = [value for node in (*subgraph.inputs, *owners) if ops.has_storage(value := node.meta.get("val"))]
            storages = {each._cdata: each.nbytes() for each in (tensor.untyped_storage() for tensor in taken)}
            made = [tensor.untyped_storage().nbytes() for tensor in (*subgraph.made, *at_peak(subgraph.temporaries))]
            need = sum([*storages.values(), *made])
            hint = need.node.hint if isinstance(need, torch.SymInt) else None
            if hint is not None and hint <= most_bytes:
                bool(need <= most_bytes)  # PyTorch notes the answer, and compares before each call

    def _resized(self, program: Program, symbols: Symbols) -> Program:
        sizes = _Sizes(symbols)
        stages = tuple(
            replace(stage, **cast(Any, self.stage_bytes(number, sizes))) for number, stage in enumerate(program.stages)
        )
        key = tuple(symbols.values())
        counts = cast(Any, self.program_bytes(sizes))
        return replace(program, identity=SizedGraph(program.identity, key), stages=stages, sizes=symbols, **counts)

    def stage_bytes(self, number: int, sizes: _Sizes) -> dict[str, int]:
        """Return the byte counts of a stage, by their names in `Stage`. Missing symbols: see `known_size`."""
        subgraph = self._subgraphs[number]
        return {
            "input_bytes": _distinct_bytes([*subgraph.inputs, *self._owners[number]], sizes),
            "output_bytes": sum(ops.storage_bytes(tensor, sizes.symbols) for tensor in subgraph.made),
            "workspace_bytes": peak_bytes(subgraph.temporaries, sizes.symbols),
            "waiting_bytes": _small_bytes(self._waiting[number], sizes),
        }

    def program_bytes(self, sizes: _Sizes) -> dict[str, int]:
        """Return the byte counts of the program, by their names in `Program`."""
        return {"kept_bytes": _distinct_bytes(self._returned, sizes), "small_bytes": _small_bytes(self._unmoved, sizes)}


def _waiting_at(subgraphs: Sequence[Subgraph], returned: Sequence[Node]) -> list[list[Node]]:
    """Return for each stage the values that a stage before it makes and one after it takes, but for what the graph returns."""
    made = {node: number for number, subgraph in enumerate(subgraphs) for node in subgraph.outputs}
    last = {node: number for number, subgraph in enumerate(subgraphs) for node in subgraph.inputs}
    kept = set(returned)
    crossing = [(node, begin, last[node]) for node, begin in made.items() if node in last and node not in kept]
    return [
        [node for node, begin, end in crossing if begin < number < end and node not in subgraph.inputs]
        for number, subgraph in enumerate(subgraphs)
    ]


def _symbol_values(placeholders: Sequence[Node], arguments: Sequence[Any]) -> dict[Any, int]:
    """Return the values of those symbols that are themselves sizes of a graph's inputs, from arguments, or their hints."""
    values: dict[Any, int] = {}
    for node, argument in zip(placeholders, arguments, strict=True):
        fake = node.meta.get("val")
        pairs: list[tuple[Any, Any]] = [(fake, argument)]
        if ops.has_storage(fake) and ops.has_storage(argument):
            pairs = list(zip((*fake.shape, *fake.stride()), (*argument.shape, *argument.stride()), strict=True))
        for symbolic, actual in pairs:
            if isinstance(symbolic, torch.SymInt) and symbolic.node.expr.is_Symbol:
                values[symbolic.node.expr] = int(actual.node.hint if isinstance(actual, torch.SymInt) else actual)
    return values


def _small_bytes(nodes: Sequence[Node], sizes: _Sizes) -> int:
    """Return the bytes of those results of `nodes` that are too small to move."""
    return _distinct_bytes([node for node in nodes if sizes[node][1] < MIN_MOVED_BYTES], sizes)


def _distinct_bytes(nodes: Sequence[Node], sizes: _Sizes) -> int:
    """Return the bytes of the storages of `nodes`. A storage that several nodes share counts once."""
    storages: dict[int, int] = {}
    for node in nodes:
        storage, size_bytes = sizes[node]
        storages[storage] = max(storages.get(storage, 0), size_bytes)
    return sum(storages.values())
