"""Programs of stages: the same bits as the graph that was cut, each distinct stage compiled once, sizes that are true."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from runtime.cpu import CpuMemory
from runtime.execution import Program, Stage, StageFunction, WorkspaceMeter, run_plain
from teraio import graph_needs
from teraio.stages import Codegen, CutPolicy, StageCompiler, cut, eager_codegen

from .graphs import (
    FINE,
    HEAVY,
    Captured,
    Embedded,
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


def test_names_are_unique_also_those_of_later_graphs_and_tell_where_a_stage_comes_from() -> None:
    compiler = StageCompiler(codegen="eager", policy=FINE)
    first, later = programs_by(compiler, transformer(3)), programs_by(compiler, transformer(3))
    names = [stage.name for program in (*first, *later) for stage in program.stages]
    assert len(set(names)) == len(names) and len({program.identity for program in (*first, *later)}) == 4
    for program in first:
        assert all(s.name.startswith(f"{program.phase}/") and s.phase == program.phase for s in program.stages)
        assert any("layers.1." in stage.name for stage in program.stages)


def test_what_slots_hold() -> None:
    """The names and kinds of inputs are taken over; gradients are what a backward graph returns, all of it the user's."""
    forward, backward = transformer(3)
    count = len(forward.arguments[0])
    known = [(f"input {number}", "parameter") for number in range(count)]
    compiler = StageCompiler(codegen="eager", policy=FINE)
    program = compiler.compile(forward.fresh(), phase="forward", options={}, inputs=known)  # type: ignore[arg-type]
    assert program.slot_names[:count] == tuple(name for name, _ in known) and set(program.slot_kinds[:count]) == {"parameter"}
    assert 0 in program.user_results and len(program.user_results) < len(program.results), "others are saved for backward"
    program = programs([backward])[0]
    made = {r for r in program.results if isinstance(r, int)} & set(range(program.input_count, program.slot_count))
    assert {s for s, kind in enumerate(program.slot_kinds) if kind == "gradient"} >= made
    assert program.user_results == tuple(range(len(program.results)))


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


def test_the_gradient_of_an_embedding_has_one_copy_in_32_bits() -> None:
    """Inductor adds it up where its zeros were."""
    _, captured = capture(Embedded(4096), torch.arange(64))
    ((stage, _, _, needed),) = stepwise(programs([captured], CutPolicy(), "inductor")[0], captured.arguments[0])
    assert needed <= stage.workspace_bytes + 1024
    assert stage.workspace_bytes < 1.1 * 4096 * 64 * 4


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
        for codegen in (eager_codegen, rewriting):
            (program,) = programs([captured], codegen=codegen)
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


class Loss(nn.Module):
    """As after a graph break."""

    def forward(self, logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))


class Scan(nn.Module):
    """A scan over time, of which backward computes all steps anew before it goes through them in the other order."""

    def forward(self, x: Tensor) -> Tensor:
        state = total = torch.zeros_like(x)
        for _ in range(16):
            state = torch.tanh(state * 0.9 + x)
            total = total + state
        return total


@pytest.mark.parametrize(
    ("model", "given", "shares"),
    [
        (Loss(), torch.randn(64, 512, requires_grad=True), (0.75, 0.75)),
        (nn.Sequential(nn.Linear(32, 32), Scan(), nn.Linear(32, 32)), features(256), (math.inf, 0.7)),
    ],
)
def test_graphs_of_light_operators_are_cut(model: nn.Module, given: Tensor, shares: tuple[float, float]) -> None:
    graphs = capture(model, given)
    for before, after, share in zip(floors(graphs, HEAVY), floors(graphs), shares, strict=True):
        assert after <= share * before
    for captured, program in zip(graphs, programs(graphs), strict=True):
        assert same(run(program, captured.arguments[0]), captured.results[0])


def test_what_a_compiler_fuses_stays_whole() -> None:
    """Inside a kernel nothing is materialised: a cut there would cost memory, time and one more compilation."""
    activation = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)), nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 32))
    forward, _ = capture(activation, features(256))

    def stages(policy: CutPolicy, codegen: str | Codegen) -> Sequence[Stage]:
        return programs([forward], policy, codegen)[0].stages

    fused, whole = stages(FINE, eager_codegen), stages(HEAVY, "eager")
    assert len(fused) == len(whole) < len(stages(FINE, "eager"))
    (up,) = (number for number, stage in enumerate(whole) if stage.workspace_bytes > 256 * 512 * 4)
    assert fused[up].workspace_bytes < 64 << 10, "what is estimated follows"


def test_backward_is_not_cut_below_what_its_forward_graph_needs() -> None:
    large_forward, _ = capture(nn.Linear(512, 2048), torch.randn(8, 512))
    assert floors([large_forward, with_loss()[1]])[1] == floors(with_loss()[1:], HEAVY)[0]


def test_stages_like_the_others_and_small_ones_stay_whole() -> None:
    """Small: less than is read and written within the least duration of a stage."""
    fine, heavy = ([[stage.name for stage in p.stages] for p in programs(transformer(3), policy)] for policy in (FINE, HEAVY))
    assert fine == heavy
    assert len(programs(with_loss(), CutPolicy())[1].stages) == 1 < len(programs(with_loss())[1].stages)
