"""Turn a captured graph into a `Program`: cut it into stages, compile each distinct stage once, lay the stages out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch._guards import TracingContext
from torch.fx import GraphModule, Node

from runtime.execution import Kind, Phase, Program, StageFunction
from teraio.stages.codegen import Codegen, eager_codegen, inductor_codegen
from teraio.stages.cost import SpeedOf, speed_of
from teraio.stages.cut import GPU_POLICY, CutPolicy, assign, can_cut
from teraio.stages.layout import CompiledStage, lay_out, results_of, user_results
from teraio.stages.operators import fake_tensors, has_storage, is_symbolic
from teraio.stages.prepare import prepare
from teraio.stages.repeatable import is_repeatable, reasons_against
from teraio.stages.split import Subgraph, split


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
        is_forward = phase == "forward"
        prepare(gm.graph)
        subgraphs = self._subgraphs(gm, floor_bytes=0 if is_forward else self._forward_bytes)
        # Compiling rewrites a subgraph: all of them are judged first.
        reasons = self._reasons(gm, subgraphs, inputs) if is_forward else [""] * len(subgraphs)
        repeatable = [is_repeatable(subgraph, keeps_seeds=self._fuses) for subgraph in subgraphs]
        stages = [
            CompiledStage(subgraph=subgraph, run=self._function(subgraph, options), repeatable=again, never_again=reason)
            for subgraph, again, reason in zip(subgraphs, repeatable, reasons, strict=True)
        ]
        _report_strides(gm)
        counted = frozenset[str]() if is_forward else self._forward_values
        program = lay_out(gm, stages, inputs, identity=identity, phase=phase, counted=counted)
        if is_forward:  # its backward graph comes next, where what it saves has the same name
            self._forward_bytes = max((stage.need_bytes for stage in program.stages), default=0)
            self._forward_values = frozenset(node.name for node in (*gm.graph.find_nodes(op="placeholder"), *results_of(gm)))
        return program

    def _reasons(self, gm: GraphModule, subgraphs: list[Subgraph], inputs: Sequence[tuple[str, Kind]]) -> list[str]:
        placeholders = gm.graph.find_nodes(op="placeholder")
        names = {node: name for node, (name, _) in zip(placeholders, inputs, strict=False)}
        output = gm.graph.output_node()
        shown = [cast(Sequence[Any], output.args[0])[i] for i in user_results(output, "forward")]
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
        if is_symbolic(subgraph.module.graph.nodes):
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
        for tensor in fake_tensors(node.meta.get("val")):
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
    for result in cast(Sequence[Any], gm.graph.output_node().args[0]):
        value = result.meta.get("val") if isinstance(result, Node) else None
        strides = value.stride() if has_storage(value) else None
        if strides is not None and not context.fakify_first_call:
            strides = _hints(strides)
        context.output_strides.append(cast(Any, strides))


def _hints(strides: Sequence[int | torch.SymInt]) -> tuple[int, ...] | None:
    """Return the strides with the sizes that the graph was captured with; None if one of them depends on data.

    PyTorch takes symbolic strides only where it splits a graph itself, as for DDP: then it calls the parts with fake tensors.
    """
    known = [stride if isinstance(stride, int) else stride.node.hint for stride in strides]
    return None if None in known else tuple(map(int, known))
