"""Programs of stages: the same bits as the graph that was cut, each distinct stage compiled once, sizes that are true."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.runtime.benchmarking import InductorBenchmarker, benchmarker
from torch._inductor.utils import fresh_cache
from torch.fx import GraphModule

from runtime.cpu import CpuMemory
from runtime.execution import Program, Stage, StageFunction, WorkspaceMeter, run_plain
from teraio import graph_needs
from teraio.stages import CutPolicy, StageCompiler, codegen, cut, eager_codegen

from ...training import begin, unequal
from .graphs import (
    FINE,
    HEAVY,
    Captured,
    capture,
    clones,
    each_model,
    features,
    programs,
    programs_by,
    same,
    tokens,
    transformer,
    transformer_of_any_size,
    with_loss,
)

Graphs = Callable[[], list[Captured]]


def run(program: Program, arguments: Sequence[Any]) -> list[Any]:
    return run_plain(program, clones(arguments))


@each_model
def test_the_same_bits_as_the_graph(graphs: Graphs) -> None:
    for policy in (FINE, CutPolicy(shortest_seconds=1e-6), CutPolicy()):
        for captured, program in zip(graphs(), programs(graphs(), policy), strict=True):
            assert len(program.stages) >= 3 or policy is not FINE
            for _ in range(2):  # nothing may be left of the first run
                assert same(run(program, captured.arguments[0]), captured.results[0])


def test_a_graph_that_cannot_be_cut_is_one_stage() -> None:
    class Sized(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros(int(x.sum().item())) + 1

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        captured = capture(Sized(), torch.tensor([2, 3]), loss=False)
    assert "computes the size" in (cut.can_cut(captured[0].graph.graph) or "")
    (program,) = programs(captured)
    assert len(program.stages) == 1 and same(run(program, captured[0].arguments[0]), captured[0].results[0])


# -- slots and names


@each_model
def test_slots_are_filled_before_they_are_read_and_freed_after_their_last_use(graphs: Graphs) -> None:
    for program in programs(graphs()):
        kept = {r for r in program.results if isinstance(r, int)}
        filled = set(range(program.input_count))
        for number, stage in enumerate(program.stages):
            later = [{*s.inputs} for s in program.stages[number + 1 :]]
            assert filled >= set(stage.inputs)
            filled |= set(stage.outputs)
            for slot in stage.frees:
                assert slot not in kept and not any(slot in inputs for inputs in later)
            filled -= set(stage.frees)
            touched = (*stage.inputs, *stage.outputs)
            ahead = [next((number + 1 + k for k, inputs in enumerate(later) if slot in inputs), -1) for slot in touched]
            assert list(stage.next_uses) == ahead
        read = {slot for stage in program.stages for slot in stage.inputs}
        assert filled - kept <= set(range(program.input_count)) - read, "something is never freed"
        assert len(program.slot_names) == len(program.slot_kinds) == program.slot_count


def test_equal_stages_are_compiled_once_and_for_all_graphs() -> None:
    compiled: list[GraphModule] = []

    def counting(module: GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> StageFunction:
        compiled.append(module)
        return eager_codegen(module, inputs, options)

    compiler = StageCompiler(codegen=counting, policy=FINE)
    first = programs_by(compiler, transformer(3))
    once = len(compiled)
    assert once == compiler.distinct_stages < sum(len(program.stages) for program in first)
    programs_by(compiler, transformer(3))
    assert len(compiled) == once


# -- sizes


def bytes_of(values: Sequence[Any]) -> int:
    """Bytes of all distinct storages, by their whole size."""
    storages = {v.untyped_storage()._cdata: v.untyped_storage() for v in values if isinstance(v, Tensor)}
    return sum(storage.nbytes() for storage in storages.values())


def stepwise(program: Program, arguments: Sequence[Any]) -> Iterator[tuple[Stage, list[Any], list[Any], int]]:
    """Run stage by stage. Gives each with its inputs, its outputs, and the bytes that it needed beyond these."""
    slots: list[Any] = clones(arguments) + [None] * (program.slot_count - program.input_count)
    for stage in program.stages:
        inputs = [slots[i] for i in stage.inputs]
        meter = WorkspaceMeter(CpuMemory())
        with meter.watching(stage):
            made = list(stage.run(list(inputs)))
        yield stage, inputs, made, meter.workspace_bytes(stage)
        for i, value in zip(stage.outputs, made, strict=True):
            slots[i] = value


def check_sizes(program: Program, arguments: Sequence[Any]) -> None:
    """Compare the sizes with the tensors that there really are."""
    for stage, inputs, made, _ in stepwise(program, arguments):
        used = {v.untyped_storage()._cdata for v in inputs if isinstance(v, Tensor)}
        fresh = [v for v in made if not isinstance(v, Tensor) or v.untyped_storage()._cdata not in used]
        assert stage.output_bytes == bytes_of(fresh), stage.name
        assert abs(stage.input_bytes - bytes_of(inputs)) <= 0.02 * bytes_of(inputs) + 64, stage.name  # ends of views


@each_model
def test_sizes_are_those_of_the_real_tensors(graphs: Graphs) -> None:
    for captured, program in zip(graphs(), programs(graphs()), strict=True):
        check_sizes(program, captured.arguments[0])
        assert program.kept_bytes >= 0.9 * bytes_of(captured.results[0]) - 64


@pytest.mark.parametrize("policy", [FINE, CutPolicy()])
def test_workspaces_are_estimated_from_above(policy: CutPolicy) -> None:
    """Without what single operators take for themselves: those of these models take little."""
    for captured, program in zip(transformer(3), programs(transformer(3), policy), strict=True):
        largest = max(v.nbytes for v in captured.results[0] if isinstance(v, Tensor))
        for stage, _, _, needed in stepwise(program, captured.arguments[0]):
            assert needed <= stage.workspace_bytes + largest // 4, (stage.name, needed, stage.workspace_bytes)


def test_a_result_that_nobody_takes_counts_until_the_others_are_taken() -> None:
    class Statistics(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            values, _ = torch.sort(x, dim=0)  # the indices take four times the memory
            return (values + 1) * 2

    (captured,) = capture(Statistics(), torch.randn(64, 64).to(torch.bfloat16), loss=False)
    ((stage, _, _, needed),) = stepwise(programs([captured])[0], captured.arguments[0])
    assert needed <= stage.workspace_bytes + 1024


def test_what_the_forward_graph_saves_counts_once_in_what_a_model_needs() -> None:
    """All is too small to move here. The backward graph adds the gradients of its results and of the parameters."""
    forward, backward = transformer(3)
    made = programs([forward, backward])
    gradients = sum(value.nbytes for value in backward.results[0] if isinstance(value, Tensor))
    assert made[1].small_bytes == gradients + forward.results[0][0].nbytes
    need = graph_needs.need_of(made)
    largest = max(stage.need_bytes for program in made for stage in program.stages)
    assert need is not None and need.size_bytes == largest + sum(program.small_bytes for program in made)


def test_what_waits_during_a_stage_counts() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third, self.last = (nn.Linear(32, 32, bias=False) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            kept = self.first(x)
            return kept + self.last(torch.tanh(self.third(torch.tanh(self.second(kept)))))

    with torch.no_grad():
        (program,) = programs(capture(Residual(), features(8), loss=False))
    waiting = {stage.name: stage.waiting_bytes for stage in program.stages}
    assert waiting == {"forward/first": 0, "forward/second": 0, "forward/third": 8 * 32 * 4, "forward/last": 0}


# -- symbolic sizes


def test_sizes_follow_the_arguments() -> None:
    for captured, program in zip(transformer_of_any_size(), programs(transformer_of_any_size()), strict=True):
        assert program.resize is not None
        sized = [program.resize(program, arguments) for arguments in captured.arguments]
        for one, arguments, results in zip(sized, captured.arguments, captured.results, strict=True):
            check_sizes(one, arguments)
            assert same(run(one, arguments), results)
        assert sum(s.output_bytes for s in sized[0].stages) < sum(s.output_bytes for s in sized[1].stages)
        assert sized[0].identity != sized[1].identity
        assert program.resize(program, captured.arguments[0]) is sized[0], "every size is worked out once"
    assert all(program.resize is None for program in programs(transformer(3)))


def test_only_the_latest_sizes_are_kept() -> None:
    """A run over sentences of any length meets a new size in every batch."""
    captured = transformer_of_any_size()[0]
    (program,) = programs([captured])

    def sized(rows: int) -> Program:
        weight, _, time, _, *others = captured.arguments[0]
        assert program.resize is not None
        return program.resize(program, [weight, rows, time, tokens(rows, time), *others])

    first, usual = sized(2), sized(3)
    for rows in range(4, 104):
        sized(rows)
        assert sized(3) is usual
    assert sized(2) is not first and sized(2).identity == first.identity


def test_sizes_do_not_depend_on_what_a_compiler_does_to_its_graph() -> None:
    """Inductor may rewrite the graph that it compiles. Of stages that are alike, only one is compiled."""

    def rewriting(module: GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> StageFunction:
        run = eager_codegen(GraphModule(module, copy.deepcopy(module.graph)), inputs, options)
        module.graph.output_node().args = ((),)
        for node in reversed([n for n in module.graph.nodes if n.op == "call_function"]):
            module.graph.erase_node(node)
        return run

    def sizes(program: Program) -> list[tuple[int, int]]:
        return [(stage.output_bytes, stage.workspace_bytes) for stage in program.stages]

    for captured in transformer_of_any_size():
        found = []
        for generate in (eager_codegen, rewriting):
            (program,) = programs([captured], codegen=generate)
            assert program.resize is not None
            found.append([sizes(program), *(sizes(program.resize(program, arguments)) for arguments in captured.arguments)])
        assert found[0] == found[1] and any(workspace for _, workspace in found[0][0])


# -- stages that need far more memory than the others are cut anywhere, if that lowers what the graph needs

LOGITS_BYTES = 4 * 16 * 512 * 4


def floors(graphs: Sequence[Captured], policy: CutPolicy = FINE) -> list[int]:
    """What the largest stage of each graph needs by itself: in graphs as small as these, all that crosses a cut is too small to
    move."""
    return [max(s.need_bytes - s.waiting_bytes for s in program.stages) for program in programs(graphs, policy)]


def test_a_loss_over_a_vocabulary_needs_what_its_largest_operators_need() -> None:
    """Which read two tensors of the size of the logits at the most, and write one."""
    forward, backward = floors(with_loss(), HEAVY)
    assert forward >= 3 * LOGITS_BYTES and backward >= 5 * LOGITS_BYTES
    forward, backward = floors(with_loss())
    assert forward <= 2.4 * LOGITS_BYTES and backward <= 3.3 * LOGITS_BYTES


# -- stages of Inductor: from its cache when a training starts again, without a C++ compiler; tuned without a buffer for caches


def start(backend: str = "teraio") -> tuple[Counter[str], list[torch.Tensor]]:
    """Train two products with a view between them for a step. Returns what Inductor counted, and the weights afterwards."""
    counters.clear()
    training = begin(
        lambda: nn.Sequential(nn.Linear(16, 32, bias=False), nn.Unflatten(1, (2, 16)), nn.Linear(16, 8, bias=False)),
        lambda module: [torch.optim.SGD(module.parameters(), lr=0.1)],
        {"codegen": "inductor"} if backend == "teraio" else {},
    )
    if backend != "teraio":
        training.model = torch.compile(training.module, backend=backend)
    training.mean_square_step(torch.ones(4, 16))
    values = list(training.finish().values())
    return Counter(counters["inductor"]), values


def test_a_second_start_compiles_no_stage_also_on_another_machine() -> None:
    with fresh_cache():
        cold, wanted = start()
        assert cold["fxgraph_cache_miss"] >= 2 and cold["fxgraph_cache_bypass"] == 0
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        warm, found = start()
        assert warm["fxgraph_cache_miss"] == 0
        assert warm["fxgraph_cache_hit"] == cold["fxgraph_cache_miss"] + cold["fxgraph_cache_hit"]
        assert not unequal(found, wanted)
    with fresh_cache():
        torch.compiler.load_cache_artifacts(saved[0])
        warm, found = start()
        assert warm["fxgraph_cache_miss"] == 0 and warm["fxgraph_cache_hit"] >= 2
        assert not unequal(found, wanted)


# -- tuned without the buffer that empties the GPU's cache


def cache_bytes() -> int:
    """Return what Inductor's benchmarker takes for its buffer, on a GPU with a cache of 60 MiB."""
    assert isinstance(benchmarker, InductorBenchmarker)
    return benchmarker.__dict__.get("L2_cache_size", 60 << 20)


def test_only_the_first_run_that_succeeds_tunes_without_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards, copies of arguments that Inductor has kept in pinned memory meanwhile are given back."""
    seen: list[int] = []
    emptied: list[int] = []
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: emptied.append(len(seen)), raising=False)

    def run(values: list[Any]) -> list[Any]:
        seen.append(cache_bytes())
        if len(seen) == 1:
            raise RuntimeError("no room")
        return values

    stage = codegen.tuned_within_budget(run)
    with pytest.raises(RuntimeError, match="no room"):
        stage([1])
    for _ in range(2):
        assert stage([1]) == [1]
    assert seen == [4096, 4096, 60 << 20] and emptied == [2]
    assert "L2_cache_size" not in vars(benchmarker)


@pytest.mark.parametrize(("device", "buffer_bytes"), [("cpu", 60 << 20), ("cuda", 4096)])
def test_stages_on_a_gpu_are_tuned_that_way(device: str, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)  # builds for CPUs have none
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", lambda *_, **__: lambda values: [cache_bytes()])
    with torch._subclasses.FakeTensorMode():
        inputs = [torch.empty(4, device=device)]
    assert codegen.inductor_codegen(GraphModule({}, torch.fx.Graph()), inputs, {})([]) == [buffer_bytes]


# -- operator by operator


def test_a_run_that_fails_keeps_nothing_of_what_it_has_made() -> None:
    """A stage that finds no memory runs again once all has left: what it had made must be gone, too."""
    made: list[weakref.ref[torch.Tensor]] = []

    def fails(value: torch.Tensor) -> torch.Tensor:
        made.append(weakref.ref(value))
        raise torch.OutOfMemoryError

    graph = torch.fx.Graph()
    given = graph.placeholder("given")
    graph.output((graph.call_function(fails, (graph.call_function(torch.neg, (given,)),)),))
    run = codegen.eager_codegen(GraphModule({}, graph), [torch.ones(2)], {})
    with pytest.raises(torch.OutOfMemoryError):
        run([torch.ones(2)])
    assert len(made) == 1 and made[0]() is None
