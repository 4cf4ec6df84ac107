"""Turn a captured graph into a `Program`: cut it into stages, compile each distinct stage once, number the slots."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch._guards import TracingContext, tracing
from torch.fx import GraphModule, Node

from runtime.execution import Constant, Kind, Phase, Program, Stage, StageFunction
from teraio.stages import cost
from teraio.stages.collectives import has_collectives, wait_for_all
from teraio.stages.cut import GPU_POLICY, CutPolicy, assign, can_cut
from teraio.stages.memory import Resizer, distinct_bytes, is_symbolic, small, stage_bytes, waiting_at
from teraio.stages.random_state import describe
from teraio.stages.recompute import is_repeatable, reasons_against
from teraio.stages.sizes import compute_sizes
from teraio.stages.speed import SpeedOf, speed_of
from teraio.stages.split import Subgraph, split
from teraio.stages.storages import storages_of
from teraio.stages.tuning import tuned_within_budget

Codegen = Callable[[GraphModule, Sequence[Any], dict[str, Any]], StageFunction]
"""Compiles one subgraph: takes its module, fake inputs and compile options, returns a boxed function."""


_CACHE_TAG = "teraio stage 1"
"""Part of the keys of Inductor's cache. A stage keeps the strides of all its outputs; the keys do not say which a graph keeps."""


def inductor_codegen(
    module: GraphModule, inputs: Sequence[Any], options: dict[str, Any], *, mode: str = "default"
) -> StageFunction:
    """Compile a subgraph with Inductor, by `torch._inductor.compile_fx.compile_fx_inner`. Takes seconds.

    What was compiled before comes from Inductor's cache, also in another process.
    mode: the mode of `torch.compile` whose settings of Inductor hold. On a GPU see [Note: Tuning within a budget].
    """
    from torch._inductor import config, list_mode_options
    from torch._inductor.compile_fx import compile_fx_inner
    from torch.compiler import config as compiler_config

    tagged: Any = compiler_config
    tag = f"{tagged.cache_key_tag} {_CACHE_TAG}".strip()
    with _fresh_tracing_context(), config.patch(list_mode_options(mode)), tagged.patch(cache_key_tag=tag):
        compiled = cast(StageFunction, compile_fx_inner(module, inputs, **options))
    on_gpu = any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in inputs)
    return tuned_within_budget(compiled) if on_gpu else compiled


def eager_codegen(module: GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> StageFunction:
    """Return a function that runs the subgraph operator by operator. Compiles nothing; for debugging and quick tests."""
    interpreter = torch.fx.Interpreter(module)

    def run(values: list[Any]) -> Sequence[Any]:
        with torch.no_grad():
            made = cast(Sequence[Any], interpreter.boxed_run(values))
        interpreter.env.clear()  # it would keep the outputs alive until the next run
        return made

    return run


@contextlib.contextmanager
def _fresh_tracing_context() -> Iterator[None]:
    """Hide metadata of the whole graph (donated buffers, strides) while a subgraph is compiled, whose inputs are others."""
    outer = TracingContext.try_get()
    fake_mode = outer.fake_mode if outer is not None else None
    inner = TracingContext(fake_mode)
    inner.output_strides = []
    with tracing(inner):
        yield


class StageCompiler:
    """Compiles graphs to programs and remembers compiled stages by structure, for as long as it lives.

    codegen, mode: the options of that name; `codegen` may also be a function. fuses: its stages fuse operators, and keep the
        seeds of random numbers, as Inductor's do; by default all but "eager" does. policy: default: by the device.
    speed_of: how fast a device is, for the places of cuts.
    """

    def __init__(
        self,
        *,
        codegen: str | Codegen,
        mode: str = "default",
        policy: CutPolicy | None = None,
        fuses: bool | None = None,
        speed_of: SpeedOf = speed_of,
    ) -> None:
        known: dict[str, Codegen] = {"inductor": partial(inductor_codegen, mode=mode), "eager": eager_codegen}
        self._codegen = known[codegen] if isinstance(codegen, str) else codegen
        self._fuses = codegen != "eager" if fuses is None else fuses
        self._policy = policy
        self._speed_of = speed_of
        self._compiled: dict[str, tuple[StageFunction, GraphModule]] = {}
        self._graphs = 0
        self._forward_bytes = 0
        self._forward_values: frozenset[str] = frozenset()

    @property
    def distinct_stages(self) -> int:
        """Number of stages that were compiled so far; equal stages count once."""
        return len(self._compiled)

    def compile(
        self, gm: GraphModule, *, phase: Phase, options: dict[str, Any], inputs: Sequence[tuple[str, Kind]] = ()
    ) -> Program:
        """Cut and compile `gm`, whose nodes have fake values in `meta["val"]`. Takes seconds with Inductor.

        options: for the compiler of the subgraphs. inputs: names and kinds of the graph's first inputs, as far as they are known.
        """
        identity = self._graphs
        self._graphs += 1
        prefix = phase if identity < 2 else f"{phase}#{identity}"
        describe(gm.graph)
        compute_sizes(gm.graph)
        wait_for_all(gm.graph)
        subgraphs = self._subgraphs(gm, floor_bytes=self._forward_bytes if phase == "backward" else 0)
        reasons = self._reasons(gm, subgraphs, inputs) if phase == "forward" else [""] * len(subgraphs)
        repeatable = [is_repeatable(subgraph, keeps_seeds=self._fuses) for subgraph in subgraphs]
        functions = [self._function(subgraph, options) for subgraph in subgraphs]
        _report_strides(gm)
        counted = self._forward_values if phase == "backward" else frozenset()
        program = _lay_out(
            gm, subgraphs, functions, reasons, repeatable, inputs, identity=identity, phase=phase, prefix=prefix, counted=counted
        )
        if phase == "forward":  # its backward graph comes next, where what it saves has the same name
            self._forward_bytes = max((stage.need_bytes for stage in program.stages), default=0)
            self._forward_values = frozenset(node.name for node in _taken_and_returned(gm))
        return program

    def _reasons(self, gm: GraphModule, subgraphs: list[Subgraph], inputs: Sequence[tuple[str, Kind]]) -> list[str]:
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        names = {node: name for node, (name, _) in zip(placeholders, inputs, strict=False)}
        (output,) = (n for n in gm.graph.nodes if n.op == "output")
        shown = [output.args[0][i] for i in _user_results(output, "forward")]
        visible = [result for result in shown if isinstance(result, Node)]
        written = _written_later(placeholders)
        return reasons_against(subgraphs, visible=visible, written=written, keeps_seeds=self._fuses, names=names)

    def _subgraphs(self, gm: GraphModule, *, floor_bytes: int) -> list[Subgraph]:
        operators = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
        if can_cut(gm.graph) is not None:
            return split(gm, dict.fromkeys(operators, 0), fuses=self._fuses)
        device, fuses = _device(gm), self._fuses
        policy = self._policy or (CutPolicy() if device.type == "cpu" else GPU_POLICY)
        stage_of = assign(gm.graph, speed=self._speed_of(device), policy=policy, floor_bytes=floor_bytes, fuses=fuses)
        return split(gm, stage_of, fuses=fuses)

    def _function(self, subgraph: Subgraph, options: dict[str, Any]) -> StageFunction:
        static = set(options.get("static_input_nodes", ()))
        positions = [i for i, node in enumerate(subgraph.inputs) if node in static]
        key = f"{subgraph.key} {positions}"
        if any(is_symbolic([node]) for node in subgraph.module.graph.nodes):
            key += f" {self._graphs}"  # guards on symbolic sizes hold for one graph only
        if key not in self._compiled:
            fake = [node.meta["val"] for node in subgraph.inputs]
            kept = {k: v for k, v in options.items() if k != "static_input_nodes"}
            function = self._codegen(subgraph.module, fake, {**kept, "static_input_idxs": positions})
            # The module keeps its constants alive: their identity is part of the key.
            self._compiled[key] = function, subgraph.module
        return self._compiled[key][0]


def _device(gm: GraphModule) -> torch.device:
    for node in gm.graph.nodes:
        for tensor in cost.fake_tensors(node.meta.get("val")):
            if tensor.device.type != "cpu":
                return tensor.device
    return torch.device("cpu")


def _written_later(placeholders: list[Node]) -> list[Node]:
    """Return the inputs of a forward graph, of all `placeholders`, that PyTorch changes once the graph has run."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None:
        return []
    return [n for n, info in zip(placeholders, metadata.input_info, strict=False) if info.mutates_data]


def _report_strides(gm: GraphModule) -> None:
    """Tell AOTAutograd the strides of the graph's outputs: those of the fake tensors, which stages keep."""
    context = TracingContext.try_get()
    if context is None or context.output_strides is None:
        return
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    for result in output.args[0]:
        value = result.meta.get("val") if isinstance(result, Node) else None
        strides = value.stride() if cost.has_storage(value) else None
        if strides is not None and not context.fakify_first_call:
            strides = _hints(strides)
        context.output_strides.append(cast(Any, strides))


def _hints(strides: Sequence[int | torch.SymInt]) -> tuple[int, ...] | None:
    """Return the strides with the sizes that the graph was captured with; None if one of them depends on data.

    PyTorch takes symbolic strides only where it splits a graph itself, as for DDP: then it calls the parts with fake tensors.
    """
    known = [stride if isinstance(stride, int) else stride.node.hint for stride in strides]
    return None if None in known else tuple(map(int, known))


def _lay_out(
    gm: GraphModule,
    subgraphs: list[Subgraph],
    functions: list[StageFunction],
    reasons: list[str],
    repeatable: list[bool],
    inputs: Sequence[tuple[str, Kind]],
    *,
    identity: int,
    phase: Phase,
    prefix: str,
    counted: frozenset[str],
) -> Program:
    """Number the slots. counted: names of the values of the forward graph, which its `small_bytes` counts."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    slots: dict[Node, int] = {n: i for i, n in enumerate(placeholders)}
    uses: dict[int, list[int]] = {}
    for number, subgraph in enumerate(subgraphs):
        for node in subgraph.outputs:
            slots[node] = len(slots)
        for node in (*subgraph.inputs, *subgraph.outputs):
            uses.setdefault(slots[node], []).append(number)
    results = tuple(slots[r] if isinstance(r, Node) else Constant(r) for r in output.args[0])
    kept = {r for r in results if isinstance(r, int)}
    names = _unique([f"{prefix}/{subgraph.path}" for subgraph in subgraphs])
    returned = [r for r in output.args[0] if isinstance(r, Node)]
    storages = storages_of(list(gm.graph.nodes))
    lasting = {storages[node] for node in (*placeholders, *returned) if node in storages}
    waiting = waiting_at(subgraphs, returned)

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
            **stage_bytes(subgraph, waiting[number], {}),
            mutates=tuple(slots[n] for n in subgraph.mutated),
            reads_lasting=all(storages[node] in lasting or small([node], {}) for node in subgraph.inputs),
            has_collectives=has_collectives(subgraph.module.graph),
            repeatable=repeatable[number],
            never_again=reasons[number],
        )

    unmoved = [n for n in (*placeholders, *returned) if n.name not in counted]
    return Program(
        identity=identity,
        name=prefix,
        phase=phase,
        stages=tuple(stage(number, subgraph) for number, subgraph in enumerate(subgraphs)),
        input_count=len(placeholders),
        slot_names=(*(name for name, _ in inputs), *(f"{prefix}/{n.name}" for n in list(slots)[len(inputs) :])),
        slot_kinds=(*(kind for _, kind in inputs), *(_kind(s, phase, s in kept) for s in range(len(inputs), len(slots)))),
        results=results,
        user_results=_user_results(output, phase),
        kept_bytes=distinct_bytes(returned, {}),
        small_bytes=distinct_bytes(small(unmoved, {}), {}),
        small_parameter_bytes=distinct_bytes(
            small([node for node, (_, kind) in zip(placeholders, inputs, strict=False) if kind == "parameter"], {}), {}
        ),
        resize=Resizer(placeholders, returned, unmoved, subgraphs) if is_symbolic(placeholders) else None,
    )


def _taken_and_returned(gm: GraphModule) -> list[Node]:
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    return [*(n for n in gm.graph.nodes if n.op == "placeholder"), *(r for r in output.args[0] if isinstance(r, Node))]


def _kind(slot: int, phase: Phase, is_result: bool) -> Kind:
    """Return what a slot holds, as far as the graph tells."""
    return "gradient" if phase == "backward" and is_result else "activation"


def _user_results(output: Node, phase: Phase) -> tuple[int, ...]:
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
