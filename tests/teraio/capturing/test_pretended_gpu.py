"""Captures of steps that run on "cuda", on machines without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.nn.functional import scaled_dot_product_attention

import planner
import teraio
from runtime.execution import Program
from teraio.capturing import GpuModel, MachineDescription, capture
from teraio.capturing.pretended_gpu import pretended_gpu
from teraio.stages import StageCompiler, gpu_speed
from teraio.stages.cost import CPU
from tests.teraio.capturing import trainings

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is pretended")

ADA = GpuModel(capability=(8, 9), multiprocessors=128)
TURING = GpuModel(capability=(7, 5), multiprocessors=40)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    teraio.reset()
    yield
    teraio.reset()
    torch._dynamo.reset()


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
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


@pytest.mark.parametrize(("autocast", "kernel"), [(False, "efficient"), (True, "flash")])
def test_a_script_that_chooses_its_device_gets_a_gpu(autocast: bool, kernel: str, operators: dict[str, set[str]]) -> None:
    trace = capture(functools.partial(trainings.on_gpu, autocast=autocast), hardware="rtx4090")
    assert operators == {
        "forward": {f"aten._scaled_dot_product_{kernel}_attention.default"},
        "backward": {f"aten._scaled_dot_product_{kernel}_attention_backward.default"},
        "devices": {"cuda:0"},
    }
    assert trace.subgroups and trace.recompute
    budget = planner.floor(trace)[0] * 5 // 4
    assert planner.plan(trace, planner.Budgets(device_bytes=budget), policy="g10").moves


@pytest.mark.parametrize("what", ["constants", "checkpointed", "scan"])
def test_what_needs_values_or_random_state_of_a_gpu_alone_is_captured(what: str) -> None:
    trace = capture(functools.partial(trainings.on_gpu_as, what), hardware="rtx4090")
    assert {stage.phase for stage in trace.stages} == {"user", "forward", "backward", "optimizer"}
    assert trace.subgroups


def test_a_model_is_captured_where_the_machine_computes(operators: dict[str, set[str]]) -> None:
    with torch.device("meta"):
        model = trainings.Transformer()
    tokens = (torch.zeros(8, 256, dtype=torch.long),)
    on_gpu = teraio.capture(model, tokens, loss=trainings.loss_of, hardware="rtx4090")
    assert operators["devices"] == {"cuda:0"}
    on_cpu = capture(
        model,
        tokens,
        loss=trainings.loss_of,
        hardware=MachineDescription.load("rtx4090").model_copy(update={"gpu": None}),
    )
    assert operators["devices"] == {"cuda:0", "cpu"}
    assert len(on_gpu.stages) < len(on_cpu.stages), "a GPU is faster, and its stages last as long"


def test_stages_are_cut_by_the_data_sheet_of_the_machine() -> None:
    machine = MachineDescription.load("a100")
    assert machine.speed_of(torch.device("cuda")) == gpu_speed((8, 0), 108, reduced=False)
    assert machine.speed_of(torch.device("cpu")) == CPU


def attention(
    gpu: GpuModel, *, mask: bool = False, key_heads: int = 4, width: int = 64, dtype: torch.dtype = torch.bfloat16
) -> str:
    with pretended_gpu(gpu), FakeTensorMode(), torch.device("cuda"):
        query = torch.empty(2, 4, 16, width, dtype=dtype, requires_grad=True)
        key = torch.empty(2, key_heads, 8, width, dtype=dtype)
        given = torch.empty(16, 8, dtype=torch.bool) if mask else None
        made = scaled_dot_product_attention(query, key, key, attn_mask=given, enable_gqa=key_heads < 4)
        assert made.shape == query.shape and made.dtype == dtype and str(made.device) == "cuda:0"
        made.sum().backward()
        assert query.grad is not None and query.grad.shape == query.shape
        return type(made.grad_fn).__name__


@pytest.mark.parametrize(
    ("gpu", "given", "kernel"),
    [
        (ADA, {}, "Flash"),
        (ADA, {"key_heads": 2}, "Flash"),
        (ADA, {"mask": True}, "Efficient"),
        (ADA, {"dtype": torch.float32}, "Efficient"),
        (ADA, {"width": 320}, "Efficient"),
        (TURING, {"dtype": torch.float16}, "Efficient"),
        (ADA, {"dtype": torch.float32, "key_heads": 2}, ""),
        (ADA, {"dtype": torch.float64}, ""),
        (TURING, {}, ""),
    ],
)
def test_the_kernels_of_attention(gpu: GpuModel, given: dict[str, Any], kernel: str) -> None:
    found = attention(gpu, **given)
    assert (kernel in found) if kernel else ("Attention" not in found)


def test_attention_that_is_switched_off_is_not_taken() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert "Attention" not in attention(ADA)


def test_what_needs_a_driver_is_refused() -> None:
    with pytest.raises(teraio.UnsupportedError, match="needs the driver of a GPU, and this machine has none; leave streams"):
        capture(trainings.needs_a_driver)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_pretended_afterwards(fails: bool) -> None:
    def training() -> Callable[[], object]:
        assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and torch.cuda.is_bf16_supported()
        step = trainings.on_gpu(fused=None)
        return trainings.needs_a_driver() if fails else step

    if fails:
        with pytest.raises(teraio.UnsupportedError):
            capture(training)
    else:
        capture(training)
    assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
    assert torch.accelerator.current_accelerator() is None
    weight = torch.ones(2, 2, requires_grad=True)
    scaled_dot_product_attention(weight, weight, weight).sum().backward()
    assert weight.grad is not None
    with pytest.raises((AssertionError, RuntimeError), match="CUDA|NVIDIA"):
        torch.zeros(1, device="cuda")
