"""Turn a captured graph into a `Program`: cut it, compile every distinct stage once, lay out the slots."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch._guards import TracingContext, tracing
from torch.fx import GraphModule, Node

from runtime.device import MIN_MOVED_BYTES
from runtime.execution import Constant, Kind, Phase, Program, Stage, StageFunction
from teraio.stages import cost as work
from teraio.stages.cut import CutPolicy, assign, can_cut
from teraio.stages.split import Subgraph, split

Codegen = Callable[[GraphModule, Sequence[Any], dict[str, Any]], StageFunction]
"""Compiles one piece: (module, fake inputs, compile options) -> boxed function."""


def inductor_codegen(module: GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> StageFunction:
    """Compile a piece with Inductor. Blocks for seconds; source: `torch._inductor.compile_fx.compile_fx_inner`."""
    from torch._inductor.compile_fx import compile_fx_inner

    with _fresh_tracing_context():
        return cast(StageFunction, compile_fx_inner(module, inputs, **options))


def eager_codegen(module: GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> StageFunction:
    """Run a piece operator by operator: no compilation, for debugging and quick tests."""
    interpreter = torch.fx.Interpreter(module)

    def run(values: list[Any]) -> Sequence[Any]:
        with torch.no_grad():
            made = cast(Sequence[Any], interpreter.boxed_run(values))
        interpreter.env.clear()  # it would keep the outputs alive until the next run
        return made

    return run


@contextlib.contextmanager
def _fresh_tracing_context() -> Iterator[None]:
    """A piece is not the whole graph: metadata that counts the graph's inputs (donated buffers, strides) must not apply."""
    outer = TracingContext.try_get()
    fake_mode = outer.fake_mode if outer is not None else None
    inner = TracingContext(fake_mode)
    inner.output_strides = []
    with tracing(inner):
        yield


class StageCompiler:
    """Compiles graphs to programs and remembers compiled stages by structure, for as long as it lives."""

    def __init__(self, *, codegen: str, policy: CutPolicy | None = None) -> None:
        self._codegen: Codegen = inductor_codegen if codegen == "inductor" else eager_codegen
        self._policy = policy or CutPolicy()
        self._compiled: dict[str, tuple[StageFunction, GraphModule]] = {}
        self._graphs = 0

    @property
    def distinct_stages(self) -> int:
        """How many stages were really compiled so far."""
        return len(self._compiled)

    def compile(
        self, gm: GraphModule, *, phase: Phase, options: dict[str, Any], inputs: Sequence[tuple[str, Kind]] = ()
    ) -> Program:
        """Cut and compile `gm` (its nodes carry fake values in `meta["val"]`).

        options: for the compiler of the pieces. inputs: names and kinds of the graph's first inputs, if known.
        """
        identity = self._graphs
        self._graphs += 1
        prefix = phase if identity < 2 else f"{phase}#{identity}"
        pieces = self._pieces(gm)
        functions = [self._function(piece, options) for piece in pieces]
        _report_strides(gm)
        return _lay_out(gm, pieces, functions, inputs, identity=identity, phase=phase, prefix=prefix)

    def _pieces(self, gm: GraphModule) -> list[Subgraph]:
        operators = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
        if can_cut(gm.graph) is not None:
            return split(gm, dict.fromkeys(operators, 0))
        return split(gm, assign(gm.graph, device_type=_device_type(gm), policy=self._policy))

    def _function(self, piece: Subgraph, options: dict[str, Any]) -> StageFunction:
        static = set(options.get("static_input_nodes", ()))
        positions = [i for i, node in enumerate(piece.inputs) if node in static]
        key = f"{piece.key} {positions}"
        if any(_is_symbolic([node]) for node in piece.module.graph.nodes):
            key += f" {self._graphs}"  # guards on symbolic sizes hold for one graph only
        if key not in self._compiled:
            fake = [node.meta["val"] for node in piece.inputs]
            kept = {k: v for k, v in options.items() if k != "static_input_nodes"}
            function = self._codegen(piece.module, fake, {**kept, "static_input_idxs": positions})
            # The module keeps constants alive, whose identity is part of the key.
            self._compiled[key] = function, piece.module
        return self._compiled[key][0]


def _device_type(gm: GraphModule) -> str:
    for node in gm.graph.nodes:
        for tensor in work.fake_tensors(node.meta.get("val")):
            if tensor.device.type != "cpu":
                return tensor.device.type
    return "cpu"


def _report_strides(gm: GraphModule) -> None:
    """AOTAutograd asks for the strides of the whole graph's outputs; stages keep those of the fake tensors."""
    context = TracingContext.try_get()
    if context is None or context.output_strides is None:
        return
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    for result in output.args[0]:
        value = result.meta.get("val") if isinstance(result, Node) else None
        strides = tuple(str(s) for s in value.stride()) if isinstance(value, torch.Tensor) else None
        context.output_strides.append(cast(Any, strides))


def _lay_out(
    gm: GraphModule,
    pieces: list[Subgraph],
    functions: list[StageFunction],
    inputs: Sequence[tuple[str, Kind]],
    *,
    identity: int,
    phase: Phase,
    prefix: str,
) -> Program:
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    slots: dict[Node, int] = {n: i for i, n in enumerate(placeholders)}
    uses: dict[int, list[int]] = {}
    for number, piece in enumerate(pieces):
        for node in piece.outputs:
            slots[node] = len(slots)
        for node in (*piece.inputs, *piece.outputs):
            uses.setdefault(slots[node], []).append(number)
    results = tuple(slots[r] if isinstance(r, Node) else Constant(r) for r in output.args[0])
    kept = {r for r in results if isinstance(r, int)}
    names = _unique([f"{prefix}/{piece.path}" for piece in pieces])
    stages = []
    for number, (piece, function) in enumerate(zip(pieces, functions, strict=True)):
        touched = [slots[n] for n in (*piece.inputs, *piece.outputs)]
        stage = Stage(
            name=names[number],
            phase=phase,
            run=function,
            inputs=tuple(slots[n] for n in piece.inputs),
            outputs=tuple(slots[n] for n in piece.outputs),
            frees=tuple(s for s in dict.fromkeys(touched) if uses[s][-1] == number and s not in kept),
            next_uses=tuple(next((u for u in uses[s] if u > number), -1) for s in touched),
            **_sizes(piece, {}),
            mutates=tuple(slots[n] for n in piece.mutated),
        )
        stages.append(stage)
    return Program(
        identity=identity,
        name=prefix,
        phase=phase,
        stages=tuple(stages),
        input_count=len(placeholders),
        slot_names=(*(name for name, _ in inputs), *(f"{prefix}/{n.name}" for n in list(slots)[len(inputs) :])),
        slot_kinds=(*(kind for _, kind in inputs), *(_kind(s, phase, s in kept) for s in range(len(inputs), len(slots)))),
        results=results,
        user_results=_user_results(output, phase),
        kept_bytes=_distinct_bytes([r for r in output.args[0] if isinstance(r, Node)], {}),
        small_bytes=_distinct_bytes(_small([*placeholders, *(r for r in output.args[0] if isinstance(r, Node))]), {}),
        resize=_Resizer(placeholders, pieces) if _is_symbolic(placeholders) else None,
    )


def _sizes(piece: Subgraph, symbols: work.Symbols) -> dict[str, int]:
    return {
        "input_bytes": _distinct_bytes(piece.inputs, symbols),
        "output_bytes": _new_bytes(piece, symbols),
        "workspace_bytes": _workspace_bytes(piece, symbols),
    }


def _is_symbolic(placeholders: Sequence[Node]) -> bool:
    for node in placeholders:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        if any(isinstance(size, torch.SymInt) for size in sizes):
            return True
    return False


class _Resizer:
    """Gives a program with symbolic sizes the byte counts of one call's arguments; remembers every size it has seen."""

    def __init__(self, placeholders: list[Node], pieces: list[Subgraph]) -> None:
        self._placeholders = placeholders
        self._pieces = pieces
        self._known: dict[tuple[int, ...], Program] = {}

    def __call__(self, program: Program, arguments: Sequence[Any]) -> Program:
        symbols = work.symbol_values(self._placeholders, arguments)
        key = tuple(symbols.values())
        if key not in self._known:
            stages = tuple(
                replace(stage, **cast(Any, _sizes(piece, symbols)))
                for stage, piece in zip(program.stages, self._pieces, strict=True)
            )
            self._known[key] = replace(program, identity=(program.identity, key), stages=stages)
        return self._known[key]


def _kind(slot: int, phase: Phase, is_result: bool) -> Kind:
    """What a slot holds, as far as the graph tells."""
    return "gradient" if phase == "backward" and is_result else "activation"


def _user_results(output: Node, phase: Phase) -> tuple[int, ...]:
    """All results of a backward graph; of a forward graph those that come before what is saved for backward."""
    count = len(cast(Sequence[Any], output.args[0]))
    if phase == "backward":
        return tuple(range(count))
    visible = output.meta.get("user_visible_output_idxs", range(count))
    return tuple(range(max(visible, default=count - 1) + 1))


def _unique(names: list[str]) -> list[str]:
    """Number names that occur more than once (`forward/root:1`)."""
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name}:{seen[name]}")
    return unique


def _distinct_bytes(nodes: Sequence[Node], symbols: work.Symbols) -> int:
    """Bytes of the storages of `nodes`, as far as the fake tensors tell; shared ones count once."""
    storages: dict[int, int] = {}
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            key = value.untyped_storage()._cdata
            storages[key] = max(storages.get(key, 0), work.storage_bytes(value, symbols))
    return sum(storages.values())


def _small(nodes: Sequence[Node]) -> list[Node]:
    return [n for n in nodes if work.output_bytes(n) < MIN_MOVED_BYTES]


StorageKey = tuple[Node, int | None]
"""The node that owns a storage, and which of its results, if it has several."""


def _storages(module: GraphModule) -> dict[Node, StorageKey]:
    """For every node of a piece the storage that its result lies in."""
    keys: dict[Node, StorageKey] = {}
    for node in module.graph.nodes:
        keys[node] = (node, None)
        if node.all_input_nodes and work.is_getitem(node) and not work.is_view(node.all_input_nodes[0]):
            keys[node] = (node.all_input_nodes[0], node.args[1])
        elif node.all_input_nodes and (work.is_view(node) or work.is_getitem(node)):
            keys[node] = keys[node.all_input_nodes[0]]
    return keys


def _storage_bytes(key: StorageKey, symbols: work.Symbols) -> int:
    owner, part = key
    value: Any = owner.meta.get("val")
    tensors = work.fake_tensors(value if part is None else value[part])
    return sum((work.storage_bytes(t, symbols) for t in tensors), 0)


def _new_bytes(piece: Subgraph, symbols: work.Symbols) -> int:
    """Bytes of the storages that the outputs lie in, inputs' storages apart."""
    storages = _storages(piece.module)
    (output,) = (n for n in piece.module.graph.nodes if n.op == "output")
    owned = {storages[n] for n in output.args[0]}
    return sum(_storage_bytes(key, symbols) for key in owned if key[0].op != "placeholder")


def _workspace_bytes(piece: Subgraph, symbols: work.Symbols) -> int:
    """Upper estimate by the lifetimes of intermediate results, run operator by operator; fused code needs less."""
    storages = _storages(piece.module)
    nodes = list(piece.module.graph.nodes)
    last: dict[StorageKey, int] = {}
    first: dict[StorageKey, int] = {}
    for number, node in enumerate(nodes):
        for source in (*node.all_input_nodes, node):
            last[storages[source]] = number
            first.setdefault(storages[source], number)
    outputs = {storages[n] for n in nodes[-1].args[0]}
    change = [0] * (len(nodes) + 1)
    for key in first:
        if key[0].op == "call_function" and key not in outputs:
            size = _storage_bytes(key, symbols)
            if key[1] is None and isinstance(key[0].meta.get("val"), (tuple, list)):
                # What nobody takes of several results lives until the others have been taken.
                size -= sum(_storage_bytes(k, symbols) for k in first if k[0] is key[0] and k[1] is not None)
            change[first[key[0], None]] += size
            change[last[key] + 1] -= size
    return max(itertools.accumulate(change))
