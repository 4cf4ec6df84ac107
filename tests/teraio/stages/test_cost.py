"""How many operations a node is estimated to need, how fast devices are taken to be, and how long stages become by that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.flop_counter import bmm_flop, flop_registry

from teraio.stages import CutPolicy, cost, cut, gpu_speed, operator_kernel, speed_of

ATEN = torch.ops.aten
BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 8, 16, 32, 4
FORWARD = 2 * 2 * BATCH * HEADS * QUERIES * KEYS * WIDTH
"""Scores of all query heads, and their product with the values: two operations each for a multiplication and an addition."""


def shape(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


QUERY, ONE_KEY = shape(BATCH, HEADS, QUERIES, WIDTH), shape(BATCH, 1, KEYS, WIDTH)


def called(operator: Any, *arguments: torch.Tensor, result: Any = None) -> Node:
    """Return a node that calls `operator`."""
    graph = Graph()
    nodes = []
    for number, value in enumerate(arguments):
        nodes.append(graph.placeholder(f"input_{number}"))
        nodes[-1].meta["val"] = value
    node = graph.call_function(operator, tuple(nodes))
    node.meta["val"] = arguments[0] if result is None else result
    return node


def formula_of_2_11(*names: str) -> Callable[..., int]:
    """Return PyTorch 2.11's formula for attention, which allows no grouped queries. names: of the arguments before the keys."""

    def formula(*arguments: Any, out_val: Any = None, **_: Any) -> int:
        query, key, value = (tensor.shape for tensor in arguments[len(names) - 1 :][:3])
        b, h, s_q, d_q = query
        _b2, _h2, s_k, _d2 = key
        _b3, _h3, _s3, d_v = value
        if not b == _b2 == _b3 or not h == _h2 == _h3 or not d_q == _d2 or not s_k == _s3:
            raise AssertionError("sdpa_flop_count: query/key/value shapes are incompatible")
        return bmm_flop((b * h, s_q, d_q), (b * h, d_q, s_k)) + bmm_flop((b * h, s_q, s_k), (b * h, s_k, d_v))

    return formula


@pytest.mark.parametrize("key_heads", [HEADS, HEADS // 4, 1])
@pytest.mark.parametrize("kernel", ["flash_attention", "cudnn_attention", "efficient_attention", "flash_attention_for_cpu"])
def test_attention_is_counted_from_the_query_heads(kernel: str, key_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = getattr(ATEN, f"_scaled_dot_product_{kernel}").default
    backward = getattr(ATEN, f"_scaled_dot_product_{kernel}_backward").default
    monkeypatch.setitem(flop_registry, forward._overloadpacket, formula_of_2_11("query"))
    monkeypatch.setitem(flop_registry, backward._overloadpacket, formula_of_2_11("grad_out", "query"))
    key = shape(BATCH, key_heads, KEYS, WIDTH)
    assert cost.flops(called(forward, QUERY, key, key)) == FORWARD
    assert cost.flops(called(backward, QUERY, QUERY, key, key)) == 2.5 * FORWARD
    outside = operator_kernel(forward, {"query": QUERY, "key": key, "value": key}, (torch.empty_like(QUERY),))
    assert outside is not None and outside.flops == FORWARD, "outside of graphs"


N = 1024
ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False}
SGD = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False}
ADAGRAD = {"lr": 1e-3, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-8, "maximize": False}


def touched(operator: Any, *given: Any, **named: Any) -> int | None:
    """Return the bytes that one call of an operator touches; None if it runs nothing."""
    schema = operator._schema
    names = [argument.name for argument in schema.arguments]
    result = operator(*given, **named) if schema.returns else ()
    kernel = operator_kernel(operator, dict(zip(names, given, strict=False)) | named, result)
    return None if kernel is None else kernel.touched_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("operator", "lists", "named", "elements"),
    [
        (ATEN._fused_adamw_.default, 4, {"max_exp_avg_sqs": [], "state_steps": [], **ADAM}, 7),
        (ATEN._fused_adam_.default, 5, {"state_steps": [], **ADAM, "amsgrad": True}, 9),
        (ATEN._fused_sgd_.default, 3, {"is_first_step": False, **SGD}, 5),
        (ATEN._fused_sgd_.default, 2, {"momentum_buffer_list": [], "is_first_step": False, **SGD}, 3),
        (ATEN._fused_adagrad_.default, 3, {"state_steps": [], **ADAGRAD}, 5),
        (ATEN._foreach_mul_.Scalar, 1, {"scalar": 0.9}, 2),
        (ATEN._foreach_add_.List, 2, {}, 3),
        (ATEN._foreach_lerp_.Scalar, 2, {"weight": 0.1}, 3),
        (ATEN._foreach_addcdiv_.Scalar, 3, {}, 4),
        (ATEN._foreach_sqrt.default, 1, {}, 2),
        (ATEN._foreach_copy_.default, 2, {}, 2),
        (ATEN._foreach_zero_.default, 1, {}, 1),
    ],
)
def test_updates_of_optimizers_touch_what_they_read_and_write(
    operator: Any, lists: int, named: dict[str, Any], elements: int, dtype: torch.dtype
) -> None:
    """AdamW reads a weight, its gradient and two moments, and writes all but the gradient: 28 bytes in fp32, 14 in bf16."""
    with FakeTensorMode():
        given = [[torch.empty(N, dtype=dtype)] for _ in range(lists)]
        assert touched(operator, *given, **named) == elements * N * dtype.itemsize


def test_only_what_reads_or_makes_data_is_a_kernel() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()) as fake:
        fake.allow_scalar_outputs = True
        x, turned, rows = torch.empty(N, 4), torch.empty(N, 4), torch.empty(2, dtype=torch.long)
        for packet in (torch.ops.prim.device, ATEN.detach, ATEN.alias, ATEN.empty_like, ATEN.is_pinned, ATEN.lift_fresh):
            assert touched(packet.default, x) is None, packet
        assert touched(ATEN.t_.default, turned) is None
        assert touched(torch.ops.profiler._record_function_enter_new.default, "mark") is None
        assert touched(ATEN.zero_.default, x) == touched(ATEN.zeros_like.default, x) == 16 * N
        square, grad = torch.empty(N), torch.empty(N)
        assert touched(ATEN.addcmul_.default, square, grad, grad) == 3 * 4 * N, "the gradient is read once"
        assert touched(ATEN.add.out, square, grad, out=torch.empty(N)) == 3 * 4 * N
        assert touched(ATEN.embedding.default, x, rows) == 2 * 8 + 2 * 2 * 16, "two rows are read, and two are made"
        assert touched(ATEN._local_scalar_dense.default, torch.empty(())) == 4


def test_attention_of_several_results_is_arithmetic_with_a_duration() -> None:
    results = (QUERY, shape(BATCH, HEADS, QUERIES))
    node = called(ATEN._scaled_dot_product_flash_attention.default, QUERY, ONE_KEY, ONE_KEY, result=results)
    assert cost.seconds(node, speed_of(torch.device("cpu"))) > 0


def test_a_product_is_counted_by_pytorch_and_other_operators_have_no_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    product = called(ATEN.mm.default, shape(3, 5), shape(5, 7), result=shape(3, 7))
    assert cost.flops(product) == 2 * 3 * 5 * 7
    assert cost.flops(called(ATEN.add.Tensor, shape(3, 5), shape(3, 5))) == 0

    def fails(*_: Any, **__: Any) -> int:
        raise AssertionError("unknown shapes")

    monkeypatch.setitem(flop_registry, ATEN.mm, fails)
    assert cost.flops(product) == 2 * 3 * 7, "it still has arithmetic"


# -- devices

H200 = ((9, 0), 132)


def products(count: int, rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Graph:
    """Return a chain of products of a matrix with square ones."""
    graph = Graph()

    def taken(name: str, *sizes: int) -> Node:
        node = graph.placeholder(name)
        node.meta["val"] = shape(*sizes, dtype=dtype)
        return node

    weights = [taken(f"weight_{number}", width, width) for number in range(count)]
    x = taken("x", rows, width)
    for weight in weights:
        made = graph.call_function(ATEN.mm.default, (x, weight))
        made.meta["val"] = x.meta["val"]
        x = made
    graph.output((x,))
    return graph


def stages_of(graph: Graph, *, reduced: bool = False) -> int:
    return len(set(cut.assign(graph, speed=gpu_speed(*H200, reduced=reduced), policy=cut.GPU_POLICY).values()))


def test_stages_of_a_gpu_last_about_two_milliseconds() -> None:
    """A product of 8192 x 8192 x 8192 takes 1.85 ms in 16 bits on an H200, and 27 ms in 32 bits."""
    assert stages_of(products(64, 8192, 8192)) == 32
    for reduced in (False, True):
        assert stages_of(products(64, 8192, 8192, torch.float32), reduced=reduced) == 64
    assert 32 <= stages_of(products(256, 8192, 4096)) <= 64
    assert stages_of(products(64, 4096, 4096)) == 22, "a short graph has stages of 0.69 ms: three products of 0.23 ms each"
    assert stages_of(products(64, 1024, 1024)) == 1, "0.23 ms in all: none is below half a millisecond"


DEVICES = [((7, 5), 40), ((8, 0), 108), ((9, 0), 114), ((10, 3), 160), ((12, 0), 170)]


@pytest.mark.parametrize(("capability", "multiprocessors"), DEVICES)
def test_unknown_devices_count_by_their_multiprocessors(capability: tuple[int, int], multiprocessors: int) -> None:
    speed, twice = (gpu_speed(capability, count * multiprocessors, reduced=False) for count in (1, 2))
    assert cost.CPU.flops_per_second < speed.flops_per_second < speed.short_flops_per_second
    assert twice.short_flops_per_second == pytest.approx(2 * speed.short_flops_per_second)


def test_tensor_cores_multiply_numbers_of_32_bits_if_allowed() -> None:
    plain, reduced = (gpu_speed(*H200, reduced=each) for each in (False, True))
    assert plain.flops_per_second < reduced.flops_per_second == pytest.approx(reduced.short_flops_per_second / 2)


def test_the_speed_of_this_machine_is_not_measured() -> None:
    assert speed_of(torch.device("cpu")) is cost.CPU
    assert CutPolicy().shortest(1.0) == pytest.approx(1 / 192) and CutPolicy().shortest(1e-3) == 1e-3
