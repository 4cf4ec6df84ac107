"""Captured traces against those of real runs, also of steps on a "cuda" that is not there; and what a capture refuses."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.nn.functional import scaled_dot_product_attention

import planner
import teraio
from runtime.execution import Program
from teraio.capturing import GpuModel, MachineDescription, capture, known_machines, pretended_gpu
from teraio.stages import Kernel, StageCompiler

from ..conftest import RunCommand
from ..optimizer.test_own_optimizers import Mixed
from ..parity.models import Predictor
from ..stages.graphs import Embedded
from ..traces import TRACES
from . import trainings
from .trainings import loss_of, tokens, training, transformer

MIB = 1 << 20
ONE_BYTE = Kernel(flops=0.0, dtype=torch.float32, touched_bytes=1)


def shape(trace: planner.Trace) -> tuple[object, ...]:
    """All of a trace but times, workspaces and hardware."""
    return (
        [(stage.name, stage.phase) for stage in trace.stages],
        [block.model_dump() for block in trace.blocks],
        [(group.stage, group.blocks, group.reads) for group in trace.recompute],
        [(subgroup.stage, subgroup.blocks, subgroup.elements) for subgroup in trace.subgroups],
    )


def moves_of_a_plan(trace: planner.Trace) -> int:
    """Under a budget a quarter above the smallest."""
    budget = planner.floor(trace)[0] * 5 // 4
    return len(planner.plan(trace, planner.Budgets(device_bytes=budget), policy="g10").moves)


def on_cpu(machine: str) -> MachineDescription:
    """The machine without its GPU."""
    return MachineDescription.load(machine).model_copy(update={"gpu": None})


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """The attention of all graphs, by phase, and the devices of their tensors, once they are compiled."""
    found: dict[str, set[str]] = {"forward": set(), "backward": set(), "devices": set()}
    compile_graph = StageCompiler.compile

    def noting(self: StageCompiler, graph: GraphModule, *, phase: Any, **named: Any) -> Program:
        for node in graph.graph.nodes:
            if "scaled_dot" in str(node.target):
                found[phase].add(str(node.target))
            if isinstance(node.meta.get("val"), Tensor):
                found["devices"].add(str(node.meta["val"].device))
        return compile_graph(self, graph, phase=phase, **named)

    monkeypatch.setattr(StageCompiler, "compile", noting)
    return found


@pytest.mark.parametrize(
    ("own", "states"), [(False, ("exp_avg", "exp_avg_sq", "master_param")), (True, ("master", "mean", "square"))]
)
def test_half_precision_weights_with_masters_are_updated_by_subgroups(own: bool, states: tuple[str, ...]) -> None:
    """Those of teraio, and those that an optimizer of one's own keeps by itself, with a promise."""

    def train() -> Callable[[], None]:
        with torch.device("cuda"):
            model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))).to(torch.bfloat16)
            inputs = torch.randn(64, 1024, dtype=torch.bfloat16)
        compiled = torch.compile(model, backend="teraio")
        optimizer: torch.optim.Optimizer = Mixed(model.parameters()) if own else torch.optim.AdamW(model.parameters())
        teraio.manage_optimizer(optimizer, master_weights=not own, independent="elements" if own else None)
        return trainings.stepping(lambda: compiled(inputs).float().square().mean().backward(), optimizer)

    trace = capture(train, subgroup_bytes=16 * MIB)
    updates = [stage for stage in trace.stages if stage.phase == "optimizer"]
    assert len(updates) == len(trace.subgroups) == 4
    kept = [block for block in trace.blocks if block.kind == "optimizer_state"]
    assert [block.size_bytes for block in kept] == [4 * MIB] * 12
    assert {block.name.rsplit(".")[-1] for block in kept} == set(states)
    needs = 2 * (2 << 20) + 3 * 4 * MIB  # parameter, gradient and states of one
    assert needs <= planner.floor(trace)[0] <= 2 * needs


def test_a_capture_has_the_stages_blocks_and_groups_of_a_real_run(tmp_path: Path) -> None:
    options = {"codegen": "eager", "memory_budget": 4 << 30, "storage": str(tmp_path), "profile_iterations": 1}
    step = training({**options, "trace_out": str(tmp_path / "trace.json")})
    for _ in range(4):
        step()
    teraio.reset()
    real = planner.Trace.load(tmp_path / "trace.json")
    captured = capture(lambda: training({"codegen": "eager"}), subgroup_bytes=real.subgroup_bytes)
    assert shape(captured) == shape(real)
    assert captured.recompute and captured.subgroups


def test_a_model_on_the_meta_device_is_captured_like_its_training(seen: dict[str, set[str]]) -> None:
    """On a machine without a GPU; on one with a GPU, it is captured there, in longer stages. Training goes on as before."""
    with torch.device("meta"):
        model = transformer()
    captured = capture(model, (tokens(),), loss=loss_of, hardware=on_cpu("h100"))
    assert seen["devices"] == {"cpu"} and captured.name == "Transformer"
    assert shape(captured) == shape(capture(training, hardware=on_cpu("h100")))
    if not torch.cuda.is_available():
        on_gpu = capture(model, (tokens(),), loss=loss_of, hardware="h100")
        assert seen["devices"] == {"cuda:0", "cpu"}
        assert len(on_gpu.stages) < len(captured.stages), "a GPU is faster, and its stages last as long"
    assert next(model.parameters()).device.type == "meta", "the model itself stays as it is"
    training({"codegen": "eager"}, width=64)()
    assert teraio.status()[0].phase == "profile"
    with pytest.raises(teraio.UnsupportedError, match="teraio is training in this process"):
        capture(training)


def test_shared_parameters_stay_shared() -> None:
    model = nn.Sequential(nn.Linear(600, 600, bias=False), nn.Linear(600, 600, bias=False))
    model[1].weight = model[0].weight
    captured = capture(model, (torch.zeros(2, 600),), loss=lambda output: output.sum())
    assert sum(block.kind == "parameter" and block.size_bytes >= MIB for block in captured.blocks) == 1


def test_a_model_larger_than_this_machine_is_captured() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(100_000, 100_000, bias=False) for _ in range(3)))  # 120 GB
    captured = capture(model, [torch.empty(16, 100_000, device="meta")], loss=lambda output: output.sum())
    assert sum(block.size_bytes for block in captured.blocks if block.kind == "parameter") == 3 * 4 * 10**10


# -- times


def test_times_come_from_the_machine() -> None:
    description = MachineDescription.load("h100")
    slow = description.model_copy(
        update={
            "flops_per_second": {name: rate / 2 for name, rate in description.flops_per_second.items()},
            "memory_bytes_per_second": description.memory_bytes_per_second / 2,
            "cache_bytes_per_second": description.cache_bytes_per_second / 2,
            "launch_seconds": 2 * description.launch_seconds,
            "operator_seconds": 2 * description.operator_seconds,
        }
    )
    fast, twice = (capture(training, hardware=each) for each in (description, slow))
    assert all(stage.duration_seconds > 0 for stage in fast.stages if stage.phase != "user")
    for one, other in zip(fast.stages, twice.stages, strict=True):
        assert other.duration_seconds == pytest.approx(2 * one.duration_seconds)
    assert fast.hardware == description.hardware


def test_gradients_of_several_passes_add_up_where_they_are_made() -> None:
    """Those of the first pass are read and written in all others, whose own are gone at once."""
    once, thrice = (capture(lambda passes=passes: trainings.in_passes(passes)) for passes in (1, 3))
    large = [block for block in thrice.blocks if block.kind == "gradient" and block.size_bytes == 16 * MIB]
    names = [[thrice.stages[number].name for number in block.writes] for block in large[:2]]
    assert all(added == [f"{made}.add"] * 2 for made, *added in names)
    assert all({*block.writes[1:]} < {*block.reads} for block in large[:2])
    assert [(len(block.uses), block.dies_after) for block in large[2:]] == [(2, None)] * 4
    assert planner.floor(thrice)[0] == planner.floor(once)[0]
    passes = once.ideal_seconds - sum(stage.duration_seconds for stage in once.stages if stage.phase == "optimizer")
    adding = sum(stage.duration_seconds for stage in thrice.stages if stage.name.endswith(".add"))
    assert 0 < adding == pytest.approx(thrice.ideal_seconds - once.ideal_seconds - 2 * passes)


def test_code_that_only_asks_costs_nothing() -> None:
    """Shapes, devices, marks of the profiler, and tensors that are made without data."""
    machine = MachineDescription.load("h100").model_copy(update={"launch_seconds": 0.0, "operator_seconds": 0.0})
    user = [stage.duration_seconds for stage in capture(trainings.only_asks, hardware=machine).stages if stage.phase == "user"]
    assert user and sum(user) == pytest.approx(4 * machine.costs(ONE_BYTE)[1]), "the gradient of the loss, one number"


def test_work_is_that_of_the_model_whatever_runs_again() -> None:
    """A forward pass, and twice that backward: products of a layer, and its attention over half of the places on average."""
    plain, *others = (
        capture(functools.partial(trainings.on_gpu_as, what), hardware="h100", tokens=512)
        for what in ("constants", "checkpointed", "outside")
    )
    assert plain.work is not None and (plain.work.tokens, plain.work.samples) == (512, None)
    products = 3 * 2 * 512 * 12 * 512**2
    assert products < plain.work.flops < 1.2 * products
    assert [again.work and again.work.flops for again in others] == pytest.approx([plain.work.flops] * 2)
    peak = MachineDescription.load("h100").flops_per_second["bfloat16"]
    assert plain.work.peak_flops_per_second == pytest.approx(peak)
    assert planner.Trace.build(**{**dict(plain), "work": None}).fingerprint == plain.fingerprint


def test_sizes_and_times_are_functions_of_the_length() -> None:
    """At lengths that were not captured they are those of a capture of that length, whose graphs were cut alike."""
    trace = capture(trainings.of_lengths, hardware=on_cpu("h100"), lengths=(64, 256), tokens=64 * 256)
    assert trace.lengths is not None and (trace.lengths.lowest, trace.lengths.highest) == ((64,), (256,))
    own = capture(lambda: functools.partial(trainings.of_lengths(), 101), hardware=on_cpu("h100"))
    there = trace.at(101)
    assert [(b.name, b.uses, b.size_bytes) for b in there.blocks] == [(b.name, b.uses, b.size_bytes) for b in own.blocks]
    for one, other in zip(there.stages, own.stages, strict=True):
        assert (one.name, one.workspace_bytes) == (other.name, other.workspace_bytes)
        assert one.duration_seconds == pytest.approx(other.duration_seconds, rel=0.1, abs=2e-6)
    assert there.work is not None and there.work.tokens == 64 * 101
    with pytest.raises(teraio.UnsupportedError, match="compile with dynamic=True"):
        capture(functools.partial(trainings.of_lengths, dynamic=False, layers=0), hardware=on_cpu("h100"), lengths=(64, 256))


def test_a_budget_has_what_is_too_large_for_it_in_tiles() -> None:
    words = torch.zeros(2048, dtype=torch.long)
    plain, tiled = (
        capture(Predictor(4096, 128), (words,), hardware=on_cpu("h100"), device_bytes=size) for size in (None, 40 << 20)
    )
    assert not plain.tiled and {each.what.partition(".")[0] for each in tiled.tiled} == {"forward/head", "backward/head"}
    whole_bytes, _ = planner.floor(plain)
    assert planner.floor(tiled)[0] < 40 << 20 < whole_bytes == pytest.approx(tiled.tiled[0].whole_bytes, rel=0.2)


def test_the_floor_is_known_with_updates_in_slices() -> None:
    """As training at that budget has them: the embedding, its gradient, and a quarter of its size for its states."""
    words = torch.zeros(16, dtype=torch.long)
    trace = capture(nn.Embedding(1 << 15, 64), (words,), loss=torch.sum, hardware=on_cpu("h100"))
    size = 8 << 20
    assert planner.floor(trace)[0] >= 4 * size
    assert planner.floor(trace, in_slices=True)[0] == pytest.approx(2 * size + size // 4, abs=1024)


def product(rows: int, columns: int, depth: int) -> Kernel:
    touched = 2 * (rows * depth + depth * columns + rows * columns)
    return Kernel(2.0 * rows * columns * depth, torch.bfloat16, touched, "product", (1, rows, columns))


def fused(megabytes: float) -> Kernel:
    return Kernel(0.0, torch.bfloat16, int(megabytes * 1e6), "fused")


def layer(tokens: int, width: int, narrow: int, hidden: int, attention: float) -> tuple[list[Kernel], list[Kernel]]:
    """The kernels of a Llama's layer, forward and backward. attention: operations of its forward pass, causal."""
    shapes = [(width, width)] * 2 + [(width, narrow)] * 2 + [(width, hidden)] * 2 + [(hidden, width)]
    state, inner, kept = tokens * width * 2e-6, tokens * hidden * 2e-6, tokens * narrow * 2e-6
    forward = [product(tokens, wide, deep) for deep, wide in shapes]
    forward += [fused(size) for size in (2 * state, 2 * kept, 4 * state, 4 * state, 2 * state, 3 * inner)]
    forward.append(Kernel(attention, torch.bfloat16, int(2.5e6 * state), "attention"))
    backward = [product(tokens, deep, wide) for deep, wide in shapes] + [product(wide, deep, tokens) for deep, wide in shapes]
    backward += [fused(size) for size in (5 * inner, 5 * state, 6 * state, 2.5 * state, 7 * kept)]
    backward.append(Kernel(2.5 * attention, torch.bfloat16, int(5e6 * state), "attention backward"))
    return forward, backward


@pytest.mark.parametrize(
    ("kernels", "published", "converted_bytes"),
    [
        (layer(8192, 4096, 1024, 14336, 77.3e9), (17.05e-3, 35.75e-3), 0),  # Llama-3-8B, 8 x 1,024 tokens
        (layer(2048, 2048, 512, 7168, 5.37e9), (1.239e-3, 2.747e-3), 6 * 54_525_952),  # 4 x 512 tokens; gradients become fp32
    ],
)
def test_layers_take_the_time_published_of_an_rtx_5090(
    kernels: tuple[list[Kernel], list[Kernel]], published: tuple[float, float], converted_bytes: int
) -> None:
    """By shadowspill, task by task. The machine was set by the first row."""
    machine = MachineDescription.load("rtx5090")
    forward, backward = (machine.stage_seconds(each) for each in kernels)
    estimated = (forward, backward + converted_bytes * machine.costs(ONE_BYTE)[1])
    assert estimated == pytest.approx(published, rel=0.03)


@pytest.mark.parametrize(
    ("trace", "kernels", "layers"),
    [
        ("llama-3-8b-h100", layer(8192, 4096, 1024, 14336, 146.0e9)[0], 1),
        ("llama-3.2-1b-h100", layer(8192, 2048, 512, 8192, 73.0e9)[0], 2),  # some stages are disturbed: the shortest count
    ],
)
def test_forward_layers_take_the_time_that_an_h100_was_measured_with(trace: str, kernels: list[Kernel], layers: int) -> None:
    """layers: after so many, the stages are alike again."""
    measured = planner.Trace.load(TRACES / "measured" / f"{trace}.json.gz")
    shortest: dict[str, list[float]] = {}
    for stage in measured.stages:
        if stage.phase == "forward" and "layers." in stage.name:
            shortest.setdefault(re.sub(r"layers\.\d+", "layers", stage.name), []).append(stage.duration_seconds)
    seconds = sum(min(times) for times in shortest.values() if len(times) > 1)
    assert MachineDescription.load("h100").stage_seconds(kernels) == pytest.approx(seconds / layers, rel=0.06)


def test_all_known_machines_are_whole(tmp_path: Path) -> None:
    assert {"h100", "h200", "a100", "rtx4090", "rtx5090", "laptop"} <= set(known_machines())
    for name in known_machines():
        hardware = MachineDescription.load(name).hardware
        assert hardware.link("device", "host") and hardware.link("storage", "device"), name
    content = MachineDescription.load("h100").model_dump(mode="json", by_alias=True)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({**content, "flops_per_second": {"bfloat16": 1e15}}))
    with pytest.raises(planner.TraceError, match="flops_per_second has bfloat16, but lacks float32"):
        MachineDescription.load(path)


# -- refusals and the command


@pytest.mark.parametrize(
    ("what", "given", "error", "message"),
    [
        (trainings.reads_the_loss, {}, teraio.UnsupportedError, "depends on the values of tensors"),
        (trainings.reads_what_is_drawn, {}, teraio.UnsupportedError, "depends on the values of tensors"),
        (trainings.compiles_with_two_options, {}, teraio.UnsupportedError, "compiles models with different options"),
        (trainings.compiles_and_never_updates, {}, teraio.UnsupportedError, "no trace yet: it waits for"),
        (trainings.compiles_nothing, {}, teraio.UnsupportedError, 'no trace yet: nothing was compiled with backend="teraio"'),
        (nn.Linear(2, 2), {}, teraio.OptionsError, "a model was given without inputs"),
        (nn.Linear(2, 2), {"inputs": (torch.zeros(2, 2),)}, teraio.OptionsError, "neither a loss nor something with a loss"),
        (training, {"hardware": "abacus"}, teraio.OptionsError, "wanted one of a100, h100"),
        (training, {"name": "a" * 9999}, teraio.OptionsError, "a name of 9,999 characters"),
        (training, {"tokens": 0}, teraio.OptionsError, "found tokens=0, wanted how many a step processes: 1 or more"),
        (training, {"lengths": (9, 9)}, teraio.OptionsError, r"found lengths=\(9, 9\), wanted the shortest, 2 or more"),
        (nn.Linear(2, 2), {"lengths": (2, 9)}, teraio.OptionsError, "lengths need a function"),
        (training, {"inputs": ()}, teraio.OptionsError, "inputs belong to a model"),
        (lambda: None, {}, teraio.OptionsError, "the function returns NoneType, wanted a function that does one step"),
    ],
)
def test_what_a_capture_refuses(what: Any, given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        teraio.capture(what, **given)


def test_the_command_writes_a_trace_that_can_be_planned(run: RunCommand, tmp_path: Path) -> None:
    path, target = tmp_path / "trace.json", "tests.teraio.capturing.trainings:training"
    told = run("capture", target, "--hardware", "rtx4090", "-o", path, "--json").json
    trace = planner.Trace.load(path)
    assert told["name"] == trace.name == "training" and moves_of_a_plan(trace)


def test_a_wrong_target(run: RunCommand, tmp_path: Path) -> None:
    refusals = {"nonsense": "wanted MODULE:FUNCTION", "no_such_module:training": "No module named", "json:x": "has no function"}
    for target, message in refusals.items():
        assert message in run("capture", target, "-o", tmp_path / "trace.json").err


# -- steps on "cuda", on machines without a GPU

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is pretended")
ADA = GpuModel(capability=(8, 9), multiprocessors=128)
TURING = GpuModel(capability=(7, 5), multiprocessors=40)


@without_gpu
@pytest.mark.parametrize(("autocast", "kernel"), [(False, "efficient"), (True, "flash")])
def test_a_script_that_chooses_its_device_gets_a_gpu(autocast: bool, kernel: str, seen: dict[str, set[str]]) -> None:
    trace = capture(functools.partial(trainings.on_gpu, autocast=autocast), hardware="rtx4090")
    assert seen == {
        "forward": {f"aten._scaled_dot_product_{kernel}_attention.default"},
        "backward": {f"aten._scaled_dot_product_{kernel}_attention_backward.default"},
        "devices": {"cuda:0"},
    }
    assert trace.subgroups and trace.recompute and moves_of_a_plan(trace)


@without_gpu
@pytest.mark.parametrize("what", ["constants", "checkpointed", "scan"])
def test_what_needs_values_or_random_state_of_a_gpu_alone_is_captured(what: str) -> None:
    trace = capture(functools.partial(trainings.on_gpu_as, what), hardware="rtx4090")
    assert {stage.phase for stage in trace.stages} == {"user", "forward", "backward", "optimizer"}
    assert trace.subgroups


def attention(
    gpu: GpuModel, *, mask: bool = False, key_heads: int = 4, width: int = 64, dtype: torch.dtype = torch.bfloat16
) -> str:
    with pretended_gpu.pretended_gpu(gpu), FakeTensorMode(), torch.device("cuda"):
        query = torch.empty(2, 4, 16, width, dtype=dtype, requires_grad=True)
        key = torch.empty(2, key_heads, 8, width, dtype=dtype)
        given = torch.empty(16, 8, dtype=torch.bool) if mask else None
        made = scaled_dot_product_attention(query, key, key, attn_mask=given, enable_gqa=key_heads < 4)
        assert made.shape == query.shape and made.dtype == dtype and str(made.device) == "cuda:0"
        made.sum().backward()
        assert query.grad is not None and query.grad.shape == query.shape
        return type(made.grad_fn).__name__


@without_gpu
@pytest.mark.parametrize(
    ("gpu", "given", "kernel"),
    [
        (ADA, {"key_heads": 2}, "Flash"),
        (ADA, {"mask": True}, "Efficient"),
        (ADA, {"width": 320}, "Efficient"),
        (TURING, {"dtype": torch.float16}, "Efficient"),
        (ADA, {"dtype": torch.float32, "key_heads": 2}, ""),
        (TURING, {}, ""),
    ],
)
def test_the_kernels_of_attention(gpu: GpuModel, given: dict[str, Any], kernel: str) -> None:
    found = attention(gpu, **given)
    assert (kernel in found) if kernel else ("Attention" not in found)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert "Attention" not in attention(gpu, **given), "what is switched off is not taken"


@without_gpu
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_pretended_afterwards_also_if_a_driver_is_needed(fails: bool) -> None:
    def on_pretended_gpu() -> Callable[[], object]:
        assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and torch.cuda.is_bf16_supported()
        step = trainings.on_gpu(fused=None)
        return trainings.needs_a_driver() if fails else step

    if fails:
        with pytest.raises(teraio.UnsupportedError, match="needs the driver of a GPU, and this machine has none; leave streams"):
            capture(on_pretended_gpu)
    else:
        capture(on_pretended_gpu)
    assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
    assert torch.accelerator.current_accelerator(check_available=True) is None
    weight = torch.ones(2, 2, requires_grad=True)
    scaled_dot_product_attention(weight, weight, weight).sum().backward()
    assert weight.grad is not None
    with pytest.raises((AssertionError, RuntimeError), match="CUDA|NVIDIA"):
        torch.zeros(1, device="cuda")


@pytest.mark.parametrize(("hardware", "indices", "copies"), [("h100", 512, 0), ("h100", 32_000, 2), (on_cpu("h100"), 512, 2)])
def test_the_gradient_of_an_embedding_has_no_copy_in_32_bits_on_a_gpu(
    hardware: str | MachineDescription, indices: int, copies: int
) -> None:
    """As PyTorch's operator adds it up; with more indices than rows, that would need more than the copy."""
    model = Embedded(32_000)
    trace = capture(model, (torch.zeros(indices, dtype=torch.int64),), hardware=hardware)
    (backward,) = (stage for stage in trace.stages if stage.phase == "backward")
    size, rows = model.words.weight.nbytes, 4 * 2 * 64 * indices
    assert copies * size <= backward.workspace_bytes <= copies * size + rows
