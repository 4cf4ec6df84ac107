"""Turn a captured graph into a `Program`: cut it into stages, compile each distinct stage once, lay the stages out.

Before that, a graph gets what PyTorch leaves out, and fewer values cross from one stage to another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch._guards import TracingContext, detect_fake_mode
from torch.fx import Graph, GraphModule, Node

from planner.schema import Tiled, Trace
from runtime.device import MIN_MOVED_BYTES
from runtime.execution import Constant, Kind, Phase, Program, SizedGraph, Stage, StageFunction
from teraio.stages import operators as ops
from teraio.stages.codegen import Codegen, eager_codegen, inductor_codegen
from teraio.stages.cost import Speed, SpeedOf, seconds, speed_of, storages_of
from teraio.stages.cut import GPU_POLICY, CutPolicy, assign, can_cut
from teraio.stages.operators import Symbols
from teraio.stages.split import Subgraph, at_peak, path_of_modules, peak_bytes, reasons_against, split
from teraio.stages.tiles import marking, settle, tile


class StageCompiler:
    """Compiles graphs to programs and remembers compiled stages by structure, for as long as it lives.

    codegen, mode: the options of that name; `codegen` may also be a function. fuses: its stages fuse operators, and keep the
        seeds of random numbers, as Inductor's do; by default all but "eager" does. policy: default: by the device.
    speed_of: how fast a device is, for the places of cuts. tiles_above_bytes: what needs more, only because it has many rows,
        runs in tiles; None: nothing does. most_bytes: what a stage may need at the most, if that can be; None: not known.
    """

    def __init__(
        self,
        *,
        codegen: str | Codegen,
        mode: str = "default",
        policy: CutPolicy | None = None,
        fuses: bool | None = None,
        speed_of: SpeedOf = speed_of,
        tiles_above_bytes: int | None = None,
        most_bytes: int | None = None,
    ) -> None:
        known: dict[str, Codegen] = {"inductor": partial(inductor_codegen, mode=mode), "eager": eager_codegen}
        self._codegen = known[codegen] if isinstance(codegen, str) else codegen
        self._fuses = codegen != "eager" if fuses is None else fuses
        self._policy = policy
        self._speed_of = speed_of
        self._tiles_above_bytes = tiles_above_bytes
        self._most_bytes = most_bytes
        self._tiled: list[tuple[Tiled, float]] = []  # with the share of its graph's time that is computed again
        self._compiled: dict[str, tuple[StageFunction, GraphModule]] = {}
        self._graphs = 0
        self._forward_bytes = 0
        self._forward_values: frozenset[str] = frozenset()

    @property
    def distinct_stages(self) -> int:
        """Number of stages that were compiled so far; equal stages count once."""
        return len(self._compiled)

    def tiled(self, trace: Trace) -> tuple[Tiled, ...]:
        """Return what runs in tiles in the iteration of `trace`."""
        found = []
        for each, share in self._tiled:
            graph = each.what.partition("/")[0]
            times = [stage.duration_seconds for stage in trace.stages if stage.name.startswith(f"{graph}/")]
            if times:
                found.append(each.model_copy(update={"again_seconds": share * sum(times)}))
        return tuple(found)

    @contextmanager
    def cutting(self, *, for_larger: bool) -> Iterator[None]:
        """Have PyTorch make and compile graphs within the block: what is to run in tiles is marked in them.

        for_larger: inputs have outgrown the graph that there was, so stages are to need half of `most_bytes`: then inputs that
        grow on do not have it made again each time.
        """
        above, given = self._tiles_above_bytes, self._most_bytes
        most = self._most_bytes = given // 2 if for_larger and given is not None else given
        try:
            with nullcontext() if above is None else marking(above_bytes=above, fuses=self._fuses, most_bytes=most):
                yield
        finally:
            self._most_bytes = given

    def compile(
        self, gm: GraphModule, *, phase: Phase, options: dict[str, Any], inputs: Sequence[tuple[str, Kind]] = ()
    ) -> Program:
        """Cut and compile `gm`, whose nodes have fake values in `meta["val"]`. Takes seconds with Inductor.

        options: for the compiler of the subgraphs. inputs: names and kinds of the graph's first inputs, as far as they are known.
        """
        identity = self._graphs
        self._graphs += 1
        is_forward = phase == "forward"
        describe(gm.graph)
        ops.compute_sizes(gm.graph)
        wait_for_all(gm.graph)
        subgraphs = self._subgraphs(gm, name_of(phase, identity), floor_bytes=0 if is_forward else self._forward_bytes)
        reasons = self._reasons(gm, subgraphs, inputs) if is_forward else [""] * len(subgraphs)
        functions = [self._function(subgraph, options) for subgraph in subgraphs]
        _report_strides(gm)
        counted = frozenset[str]() if is_forward else self._forward_values
        program = lay_out(gm, subgraphs, functions, reasons, inputs, identity=identity, phase=phase, counted=counted)
        if is_forward:  # its backward graph comes next, where what it saves has the same name
            largest = program if program.resize is None else program.resize.at(program, {})
            self._forward_bytes = max((stage.need_bytes for stage in largest.stages), default=0)
            self._forward_values = frozenset(node.name for node in (*gm.graph.find_nodes(op="placeholder"), *results_of(gm)))
        return program

    def _reasons(self, gm: GraphModule, subgraphs: list[Subgraph], inputs: Sequence[tuple[str, Kind]]) -> list[str]:
        placeholders = gm.graph.find_nodes(op="placeholder")
        names = {node: name for node, (name, _) in zip(placeholders, inputs, strict=False)}
        output = gm.graph.output_node()
        shown = [cast(Sequence[Any], output.args[0])[i] for i in user_results(output, "forward")]
        visible = [result for result in shown if isinstance(result, Node)]
        context = TracingContext.try_get()
        metadata = context.fw_metadata if context is not None else None
        known = () if metadata is None else zip(placeholders, metadata.input_info, strict=False)
        written = [node for node, each in known if each.mutates_data]  # by PyTorch, once the graph has run
        return reasons_against(subgraphs, visible=visible, written=written, names=names)

    def _subgraphs(self, gm: GraphModule, name: str, *, floor_bytes: int) -> list[Subgraph]:
        """Return the stages of a graph, with what is marked in tiles. floor_bytes: as for `assign`."""
        if can_cut(gm.graph) is not None:
            operators = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
            return split(gm, dict.fromkeys(operators, 0), fuses=self._fuses)
        fuses, most = self._fuses, self._most_bytes
        device = ops.device_of(tensor for node in gm.graph.nodes for tensor in ops.fake_tensors(node.meta.get("val")))
        policy = self._policy or (CutPolicy() if device.type == "cpu" else GPU_POLICY)
        speed = self._speed_of(device)
        self._tile(gm.graph, name, speed)
        stage_of = assign(gm.graph, speed=speed, policy=policy, floor_bytes=floor_bytes, fuses=fuses, most_bytes=most)
        settle(gm.graph)
        return split(gm, stage_of, fuses=fuses)

    def _tile(self, graph: Graph, name: str, speed: Speed) -> None:
        """Have what is marked run in tiles, and note what that is."""
        takes: dict[Node, float] = {}  # of the graph as it is before the first region
        for tiles, whole_bytes, operators in tile(graph):
            takes = takes or {node: seconds(node, speed) for node in graph.nodes}
            of_forward = [node for node in operators if node.meta.get("partitioner_tag") == "is_forward"]
            again = 0.0 if name.startswith("forward") else sum(takes[node] for node in of_forward)
            made = Tiled(what=f"{name}/{path_of_modules(operators)}", tiles=tiles, whole_bytes=whole_bytes, again_seconds=0.0)
            self._tiled.append((made, again / sum(takes.values())))

    def _function(self, subgraph: Subgraph, options: dict[str, Any]) -> StageFunction:
        key = subgraph.key
        if ops.is_symbolic(subgraph.module.graph.nodes):
            key += f" {self._graphs}"  # guards on symbolic sizes hold for one graph only
        if key not in self._compiled:
            fake = [node.meta["val"] for node in subgraph.inputs]
            function = self._codegen(subgraph.module, fake, {**options, "static_input_idxs": []})
            # The module keeps its constants alive: their identity is part of the key.
            self._compiled[key] = function, subgraph.module
        return self._compiled[key][0]


def _report_strides(gm: GraphModule) -> None:
    """Tell AOTAutograd the strides of the graph's outputs: those of the fake tensors, which stages keep."""
    context = TracingContext.try_get()
    if context is None or context.output_strides is None:
        return
    for result in cast(Sequence[Any], gm.graph.output_node().args[0]):
        value = result.meta.get("val") if isinstance(result, Node) else None
        strides = value.stride() if ops.has_storage(value) else None
        if strides is not None and not context.fakify_first_call:
            strides = _hints(strides)
        context.output_strides.append(cast(Any, strides))


def _hints(strides: Sequence[int | torch.SymInt]) -> tuple[int, ...] | None:
    """Return the strides with the sizes that the graph was captured with; None if one of them depends on data.

    PyTorch takes symbolic strides only where it splits a graph itself, as for DDP: then it calls the parts with fake tensors.
    """
    known = [stride if isinstance(stride, int) else stride.node.hint for stride in strides]
    return None if None in known else tuple(map(int, known))


def describe(graph: Graph) -> None:
    """Give the operators with random state in `graph` what PyTorch leaves out: fake results and the module they come from.

    A random state has a fixed size. PyTorch gives it a symbolic one, which would keep equal layers from sharing a stage.
    """
    for node in graph.nodes:
        if node.op == "placeholder" and node.name.startswith("rng_state_output"):
            node.meta["val"] = _of_fixed_size(node.meta["val"])
        if not ops.carries_random_state(node):
            continue
        states = [user for user in node.users if node.target is ops.SAVES_STATE and user.args[1] == 0]
        for state in states:
            state.meta["val"] = _of_fixed_size(state.meta["val"])
        if node.meta.get("val") is None:
            result = _run(node)
            node.meta["val"] = (states[0].meta["val"] if states else None, result) if node.target is ops.SAVES_STATE else result
        for near in (*node.users, *node.all_input_nodes):
            for key in ("nn_module_stack", "fwd_nn_module_stack"):
                if key in near.meta:
                    node.meta.setdefault(key, near.meta[key])


def _of_fixed_size(state: torch.Tensor) -> torch.Tensor:
    (size,) = state.shape
    if isinstance(size, int):
        return state
    mode = detect_fake_mode(state)
    with mode if mode is not None else torch.no_grad():
        return torch.empty(int(size.node.hint), dtype=state.dtype, device=state.device)


def _run(node: Node) -> Any:
    """Return the fake result of the operator inside `node`."""
    operator, args, kwargs = torch.fx.node.map_arg(ops.unwrapped(node), lambda source: source.meta.get("val"))
    mode = detect_fake_mode((args, kwargs))
    with mode if mode is not None else torch.no_grad():
        return operator(*args, **kwargs)


def wait_for_all(graph: Graph) -> None:
    """Have each collective of the graph waited for that is not. To wait twice does no harm. Changes `graph`."""
    for node in list(graph.nodes):
        if not (ops.is_launch(node) and node.target.namespace in ops.FUNCTIONAL_COLLECTIVES):
            continue
        results = [user for user in node.users if ops.is_getitem(user)] or [node]
        for result in results:
            if isinstance(result.meta.get("val"), torch.Tensor) and not any(ops.is_wait(user) for user in result.users):
                with graph.inserting_after(results[-1]):
                    wait = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (result,))
                wait.meta = dict(result.meta)


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
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
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
        resized = self._known.pop(key, None) or self.at(program, symbols)
        self._known[key] = resized
        if len(self._known) > _MOST_SIZES:
            del self._known[next(iter(self._known))]
        return resized

    def bound(self, most_bytes: int) -> None:
        for subgraph, owners in zip(self._subgraphs, self._owners, strict=True):
            taken = [value for node in (*subgraph.inputs, *owners) if ops.has_storage(value := node.meta.get("val"))]
            storages = {each._cdata: each.nbytes() for each in (tensor.untyped_storage() for tensor in taken)}
            made = [tensor.untyped_storage().nbytes() for tensor in (*subgraph.made, *at_peak(subgraph.temporaries))]
            need = sum([*storages.values(), *made])
            hint = need.node.hint if isinstance(need, torch.SymInt) else None
            if hint is not None and hint <= most_bytes:
                bool(need <= most_bytes)  # PyTorch notes the answer, and compares before each call

    def at(self, program: Program, symbols: Symbols) -> Program:
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
