"""Where graphs are cut: every operator in one stage, in order, before operators that are worth a stage."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.flop_counter import flop_registry

from teraio.stages import CutPolicy, StageCompiler, cost, cut, gpu_speed, operator_kernel, operators, speed_of

from .graphs import FINE, HEAVY, Captured, ConvNet, capture, clones, each_model, images, transformer

Graphs = Callable[[], list[Captured]]


def stages(graph: GraphModule, policy: CutPolicy = FINE) -> dict[Node, int]:
    return cut.assign(graph.graph, speed=speed_of(torch.device("cpu")), policy=policy)


def count(graph: GraphModule, policy: CutPolicy = FINE) -> int:
    return len(set(stages(graph, policy).values()))


@each_model
def test_there_are_no_more_stages_than_wanted(graphs: Graphs) -> None:
    for captured in graphs():
        for most in (1, 2, 5, 9):
            assert count(captured.fresh(), CutPolicy(shortest_seconds=0.0, max_stages=most)) <= most
        assert set(stages(captured.fresh(), CutPolicy()).values()) == {0}, "small graphs are one stage"


def only_updates(node: Node) -> bool:
    """Whether the graph uses the result in nothing but writes in place, or is such a write."""
    return node.target is torch.ops.aten.copy_.default or bool(node.users) and all(only_updates(user) for user in node.users)


@each_model
def test_cuts_are_made_right_before_heavy_operators(graphs: Graphs) -> None:
    """Also the pieces of the other side of a cut are whole: what is heavy never follows another stage's light work.

    New values of the running statistics of batch norm are computed last, wherever that is.
    """
    for captured in graphs():
        graph = captured.fresh()
        stage_of = stages(graph, HEAVY)
        first: dict[int, Node] = {}
        for node in graph.graph.nodes:
            free = operators.is_view(node) or operators.is_getitem(node) or operators.is_creation(node)
            if node in stage_of and not free and not only_updates(node):
                first.setdefault(stage_of[node], node)
        later = [node for stage, node in first.items() if stage > min(first)]
        assert later and all(cost.flops(node) > 0 for node in later)


class Products(nn.Module):
    """`x @ weight` and attention by hand: for each layer, PyTorch saves views of what the layer makes."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(64, 64) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            y = torch.tanh(x @ weight).view(4, -1, 64)
            x = x + ((y @ y.transpose(1, 2)).softmax(-1) @ y).view(x.shape)
        return x


@pytest.mark.parametrize(
    ("policy", "dynamic"), [(FINE, True), (CutPolicy(shortest_seconds=1e-9, far_above=0.1), False), (CutPolicy(), False)]
)
def test_views_that_backward_gets_are_made_where_their_storage_is(policy: CutPolicy, dynamic: bool) -> None:
    """PyTorch puts them at the end of the forward graph, where one stage would need what all layers save."""
    layers = 3
    stage_of = stages(capture(Products(layers), torch.randn(32, 64), dynamic=dynamic)[0].fresh(), policy)
    saved = [n for n in stage_of if operators.is_view(n) and all(user.op == "output" for user in n.users)]
    assert len(saved) >= layers
    for view in saved:
        shown = view.all_input_nodes[0]
        readers = [stage for user, stage in stage_of.items() if shown in user.all_input_nodes and user not in saved]
        assert stage_of[view] == (stage_of[shown] if shown in stage_of else min(readers))


# -- how finely


@pytest.mark.parametrize("fuses", [False, True])
def test_no_stage_needs_more_than_it_may_where_a_cut_helps(fuses: bool) -> None:
    """Layers are alike, so that no stage is far above the others; but each may be cut into what fits."""
    for captured in transformer(3):
        needs = needs_of(captured, fuses=fuses)
        limit = int(0.9 * max(needs))
        limited = needs_of(captured, fuses=fuses, most_bytes=limit)
        assert max(limited) <= limit and len(limited) > len(needs)
        assert needs_of(captured, fuses=fuses, most_bytes=2 * max(needs)) == needs
        least = needs_of(captured, fuses=fuses, most_bytes=1)  # no cut helps that much: as low as it is worth
        assert max(least) < 1.25 * max(limited)


def needs_of(captured: Captured, *, fuses: bool, most_bytes: int | None = None) -> list[int]:
    """What each stage needs."""
    compiler = StageCompiler(codegen="eager", policy=HEAVY, fuses=fuses, most_bytes=most_bytes)
    stages = compiler.compile(captured.fresh(), phase="forward", options={}).stages
    return [stage.input_bytes + stage.output_bytes + stage.workspace_bytes for stage in stages]


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("layers.3.mlp.up", "layers.3"),
        ("encoder.blocks.2.0", "encoder.blocks.2"),
        ("head", "head"),
        ("", ""),
        # layers in layers, as of Swin, ConvNeXt and a UNet
        ("up_blocks.1.attentions.0.transformer_blocks.2.ff.net.0.proj", "up_blocks.1.attentions.0.transformer_blocks.2"),
        # parts of one layer, not layers
        ("layers.3.mlp.experts.5.up", "layers.3"),
    ],
)
def test_the_layer_of_a_module(path: str, layer: str) -> None:
    assert cut.layer_of(path) == layer


# -- what cannot be cut, or only once sizes are computed


def test_a_graph_with_a_higher_order_operator() -> None:
    graph = Graph()
    graph.output((graph.call_function(torch.ops.higher_order.cond, (graph.placeholder("x"),)),))
    assert "higher-order operator cond" in (cut.can_cut(graph) or "")


@functools.cache
def convolutions_of_any_size() -> list[Captured]:
    return capture(ConvNet(2), images(4), images(6), dynamic=True)


@pytest.mark.parametrize("index", [0, 1])
def test_batch_norm_of_any_size(index: int) -> None:
    """Sizes that are read off tensors are computed from those among the inputs instead."""
    captured = convolutions_of_any_size()[index]
    changed = captured.fresh()
    if index == 0:
        assert cut.can_cut(changed.graph), "or this test shows nothing"
    operators.compute_sizes(changed.graph)
    changed.graph.lint()
    assert cut.can_cut(changed.graph) is None and not any(map(operators.is_read_off, changed.graph.nodes))
    for arguments, expected in zip(captured.arguments, captured.results, strict=True):
        with torch.no_grad():
            found = torch.fx.Interpreter(changed).run(*clones(arguments))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


# -- how many operations a node is estimated to need, how fast devices are taken to be, and how long stages become by that

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


@pytest.mark.parametrize(
    ("kernel", "key_heads"),
    [("flash_attention", HEADS // 4), ("cudnn_attention", 1), ("efficient_attention", HEADS), ("flash_attention_for_cpu", 1)],
)
def test_attention_is_counted_from_the_query_heads(kernel: str, key_heads: int) -> None:
    """PyTorch 2.11 itself allows no grouped queries there."""
    forward = getattr(ATEN, f"_scaled_dot_product_{kernel}").default
    backward = getattr(ATEN, f"_scaled_dot_product_{kernel}_backward").default
    key = shape(BATCH, key_heads, KEYS, WIDTH)
    assert cost.flops(called(forward, QUERY, key, key)) == FORWARD
    assert cost.flops(called(backward, QUERY, QUERY, key, key)) == 2.5 * FORWARD
    outside = operator_kernel(forward, {"query": QUERY, "key": key, "value": key}, (torch.empty_like(QUERY),))
    assert outside is not None and outside.flops == FORWARD, "outside of graphs"


N = 1024
ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False}
SGD = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False}


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
        (ATEN._foreach_lerp_.Scalar, 2, {"weight": 0.1}, 3),
        (ATEN._foreach_addcdiv_.Scalar, 3, {}, 4),
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
        image, filters = torch.empty(2, 3, 8, 8), torch.empty(5, 3, 3, 3)
        assert touched(ATEN.conv2d.default, image, filters) == 4 * (2 * 3 * 64 + 5 * 27 + 2 * 5 * 36)


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
    assert speed_of(torch.device("meta")) == gpu_speed(*H200, reduced=False), "of devices that nobody knows"
    assert stages_of(products(64, 8192, 8192)) == 32
    for reduced in (False, True):
        assert stages_of(products(64, 8192, 8192, torch.float32), reduced=reduced) == 64
    assert 32 <= stages_of(products(256, 8192, 4096)) <= 64
    assert stages_of(products(64, 4096, 4096)) == 22, "a short graph has stages of 0.69 ms: three products of 0.23 ms each"
    assert stages_of(products(64, 1024, 1024)) == 1, "0.23 ms in all: none is below half a millisecond"
