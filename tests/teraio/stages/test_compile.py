"""Programs of stages: the same bits as the graph that was cut, each distinct stage compiled once, sizes that are true."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from runtime.cpu import CpuMemory
from runtime.execution import Program, StageFunction, WorkspaceMeter, run_managed, run_plain
from runtime.paging import Pager
from teraio.following import IterationObserver
from teraio.stages import layout
from teraio.stages.codegen import eager_codegen
from teraio.stages.compile import StageCompiler
from teraio.stages.cut import CutPolicy

from .graphs import MODELS, Captured, capture, clones, convolutions, features, tokens, transformer, transformer_of_any_size

FINE = CutPolicy(shortest_seconds=1e-9)


@pytest.fixture(scope="module", params=MODELS)
def graphs(request: pytest.FixtureRequest) -> list[Captured]:
    return MODELS[request.param]()


def compiler(policy: CutPolicy = FINE) -> StageCompiler:
    return StageCompiler(codegen="eager", policy=policy)


def programs(graphs: Sequence[Captured], made_by: StageCompiler | None = None) -> list[Program]:
    made_by = made_by or compiler()
    return [made_by.compile(g.fresh(), phase=g.phase, options={}) for g in graphs]


def same(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    def one(a: Any, b: Any) -> bool:
        return torch.equal(a, b) and a.stride() == b.stride() if isinstance(a, Tensor) else bool(a == b)

    return len(found) == len(wanted) and all(map(one, found, wanted))


def run(program: Program, arguments: Sequence[Any]) -> list[Any]:
    return run_plain(program, clones(arguments))


def test_the_same_bits_as_the_graph(graphs: list[Captured]) -> None:
    for captured, program in zip(graphs, programs(graphs), strict=True):
        assert len(program.stages) >= 3
        for _ in range(2):  # nothing may be left of the first run
            assert same(run(program, captured.arguments[0]), captured.results[0])


def test_the_same_bits_under_management(graphs: list[Captured]) -> None:
    for captured, program in zip(graphs, programs(graphs), strict=True):
        pager = Pager(mover=None, budget_bytes=None)
        arguments = clones(captured.arguments[0])
        found = run_managed(program, arguments, pager, IterationObserver(pager), WorkspaceMeter(None))
        assert same(found, captured.results[0])


def test_running_statistics_are_updated() -> None:
    forward, _ = convolutions()
    (program, _) = programs(convolutions())
    arguments = clones(forward.arguments[0])
    changed = list(arguments)
    run_plain(program, arguments)
    before = forward.arguments[0]
    moved = {i for i, (a, b) in enumerate(zip(changed, before, strict=True)) if isinstance(a, Tensor) and not torch.equal(a, b)}
    assert len(moved) == 6, "mean, variance and count of two layers"
    assert {i for stage in program.stages for i in stage.mutates} == moved


# -- slots


def test_slots_are_filled_before_they_are_read_and_freed_after_their_last_use(graphs: list[Captured]) -> None:
    for program in programs(graphs):
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


def test_names_are_unique_and_tell_where_a_stage_comes_from() -> None:
    for program in programs(transformer(3)):
        names = [stage.name for stage in program.stages]
        assert len(set(names)) == len(names)
        assert all(name.startswith(f"{program.phase}/") for name in names)
        assert any("layers.1." in name for name in names)
        assert all(stage.phase == program.phase for stage in program.stages)


def test_later_graphs_have_names_of_their_own() -> None:
    made_by = compiler()
    first, second = programs(transformer(3), made_by), programs(transformer(3), made_by)
    names = [stage.name for program in (*first, *second) for stage in program.stages]
    assert len(set(names)) == len(names)
    assert len({program.identity for program in (*first, *second)}) == 4


def test_the_names_of_inputs_are_taken_over() -> None:
    forward = transformer(3)[0]
    count = len(forward.arguments[0])
    known = [(f"input {number}", "parameter") for number in range(count)]
    program = compiler().compile(forward.fresh(), phase="forward", options={}, inputs=known)  # type: ignore[arg-type]
    assert program.slot_names[:count] == tuple(name for name, _ in known)
    assert set(program.slot_kinds[:count]) == {"parameter"}


def test_gradients_are_what_a_backward_graph_returns() -> None:
    _, backward = programs(transformer(3))
    returned = {r for r in backward.results if isinstance(r, int)}
    own = set(range(backward.input_count, backward.slot_count))
    assert {s for s, kind in enumerate(backward.slot_kinds) if kind == "gradient"} >= returned & own
    assert backward.user_results == tuple(range(len(backward.results)))


def test_what_is_saved_for_backward_is_no_user_s_result() -> None:
    forward, _ = programs(transformer(3))
    assert 0 in forward.user_results and len(forward.user_results) < len(forward.results)


# -- compiled once


class Counting(StageCompiler):
    """Counts what it really compiles."""

    def __init__(self) -> None:
        super().__init__(codegen="eager", policy=FINE)
        self.compiled = 0
        self._codegen = self._count

    def _count(self, module: GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> StageFunction:
        self.compiled += 1
        return eager_codegen(module, inputs, options)


def test_equal_stages_are_compiled_once_and_for_all_graphs() -> None:
    made_by = Counting()
    first = programs(transformer(3), made_by)
    once = made_by.compiled
    assert once == made_by.distinct_stages < sum(len(program.stages) for program in first)
    programs(transformer(3), made_by)
    assert made_by.compiled == once


def test_a_graph_that_can_not_be_cut_is_one_stage() -> None:
    class Sized(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros(int(x.sum().item())) + 1

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        captured = capture(Sized(), torch.tensor([2, 3]), loss=False)
    (program,) = programs(captured)
    assert len(program.stages) == 1
    assert same(run(program, captured[0].arguments[0]), captured[0].results[0])


# -- sizes


def bytes_of(values: Sequence[Any]) -> int:
    """Bytes of all distinct storages, by their whole size."""
    storages = {v.untyped_storage()._cdata: v.untyped_storage() for v in values if isinstance(v, Tensor)}
    return sum(storage.nbytes() for storage in storages.values())


def check_sizes(program: Program, arguments: Sequence[Any]) -> None:
    """Run stage by stage and compare the sizes with the tensors that there really are."""
    slots: list[Any] = clones(arguments) + [None] * (program.slot_count - program.input_count)
    for stage in program.stages:
        inputs = [slots[i] for i in stage.inputs]
        used = {v.untyped_storage()._cdata for v in inputs if isinstance(v, Tensor)}
        made = stage.run(list(inputs))
        fresh = [v for v in made if not isinstance(v, Tensor) or v.untyped_storage()._cdata not in used]
        assert stage.output_bytes == bytes_of(fresh), stage.name
        assert abs(stage.input_bytes - bytes_of(inputs)) <= 0.02 * bytes_of(inputs) + 64, stage.name  # ends of views
        for i, value in zip(stage.outputs, made, strict=True):
            slots[i] = value


def test_sizes_are_those_of_the_real_tensors(graphs: list[Captured]) -> None:
    for captured, program in zip(graphs, programs(graphs), strict=True):
        check_sizes(program, captured.arguments[0])


def measured_workspace(program: Program, arguments: Sequence[Any]) -> dict[str, tuple[int, int]]:
    """Of every stage: bytes that it needed beyond inputs and outputs, and the estimate."""
    found: dict[str, tuple[int, int]] = {}
    slots: list[Any] = clones(arguments) + [None] * (program.slot_count - program.input_count)
    for stage in program.stages:
        meter = WorkspaceMeter(CpuMemory())
        with meter.watching(stage):
            made = stage.run([slots[i] for i in stage.inputs])
        found[stage.name] = (meter.workspace_bytes(stage), stage.workspace_bytes)
        for i, value in zip(stage.outputs, made, strict=True):
            slots[i] = value
    return found


@pytest.mark.parametrize("policy", [FINE, CutPolicy()])
def test_workspaces_are_estimated_from_above(policy: CutPolicy) -> None:
    """Without what single operators take for themselves: those of these models take little."""
    for captured, program in zip(transformer(3), programs(transformer(3), compiler(policy)), strict=True):
        largest = max(v.nbytes for v in captured.results[0] if isinstance(v, Tensor))
        for name, (needed, estimate) in measured_workspace(program, captured.arguments[0]).items():
            assert needed <= estimate + largest // 4, (name, needed, estimate)


def test_a_result_that_nobody_takes_counts_until_the_others_are_taken() -> None:
    class Statistics(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            values, _ = torch.sort(x, dim=0)  # the indices take four times the memory
            return (values + 1) * 2

    (captured,) = capture(Statistics(), torch.randn(64, 64).to(torch.bfloat16), loss=False)
    (program,) = programs([captured])
    ((needed, estimate),) = measured_workspace(program, captured.arguments[0]).values()
    assert needed <= estimate + 1024


def test_kept_bytes_are_those_of_the_results(graphs: list[Captured]) -> None:
    for captured, program in zip(graphs, programs(graphs), strict=True):
        distinct = bytes_of(captured.results[0])
        assert program.kept_bytes >= 0.9 * distinct - 64


def test_what_stages_read_lasts_if_the_graph_takes_or_returns_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MIN_MOVED_BYTES", 1)
    (program,) = programs(transformer(3)[:1])
    kept = {*range(program.input_count), *(result for result in program.results if isinstance(result, int))}
    assert {stage.reads_lasting for stage in program.stages} == {False, True}
    for stage in program.stages:
        if not stage.reads_lasting:
            assert not kept.issuperset(stage.inputs), stage.name


# -- symbolic sizes


def test_sizes_follow_the_arguments() -> None:
    for captured, program in zip(transformer_of_any_size(), programs(transformer_of_any_size()), strict=True):
        resize: Callable[[Program, Sequence[Any]], Program] | None = program.resize
        assert resize is not None
        sized = [resize(program, arguments) for arguments in captured.arguments]
        for one, arguments, results in zip(sized, captured.arguments, captured.results, strict=True):
            check_sizes(one, arguments)
            assert same(run(one, arguments), results)
        assert sum(s.output_bytes for s in sized[0].stages) < sum(s.output_bytes for s in sized[1].stages)
        assert sized[0].identity != sized[1].identity
        assert resize(program, captured.arguments[0]) is sized[0], "every size is worked out once"


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
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        output.args = ((),)
        for node in reversed([n for n in module.graph.nodes if n.op == "call_function"]):
            module.graph.erase_node(node)
        return run

    def sizes(program: Program) -> list[tuple[int, int]]:
        return [(stage.output_bytes, stage.workspace_bytes) for stage in program.stages]

    for captured in transformer_of_any_size():
        found = []
        for codegen in (eager_codegen, rewriting):
            (program,) = programs([captured], StageCompiler(codegen=codegen, policy=FINE))
            assert program.resize is not None
            found.append([sizes(program), *(sizes(program.resize(program, arguments)) for arguments in captured.arguments)])
        assert found[0] == found[1]
        assert any(workspace for _, workspace in found[0][0])


def test_static_graphs_are_not_resized() -> None:
    assert all(program.resize is None for program in programs(transformer(3)))


def test_constants_in_results() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
            self.first.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))

    captured = capture(Frozen(), features())
    for one, program in zip(captured, programs(captured), strict=True):
        found = run(program, one.arguments[0])
        assert same(found, one.results[0])
    assert None in captured[1].results[0]
