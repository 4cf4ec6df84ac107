"""Where graphs are cut: every operator in one stage, in order, before operators that are worth a stage."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from teraio.stages import CutPolicy, StageCompiler, cost, cut, operators, sizes, speed_of

from .graphs import (
    FINE,
    HEAVY,
    Captured,
    ConvNet,
    capture,
    clones,
    constants,
    each_model,
    images,
    transformer,
)

Graphs = Callable[[], list[Captured]]


def stages(graph: GraphModule, policy: CutPolicy = FINE) -> dict[Node, int]:
    return cut.assign(graph.graph, speed=speed_of(torch.device("cpu")), policy=policy)


def count(graph: GraphModule, policy: CutPolicy = FINE) -> int:
    return len(set(stages(graph, policy).values()))


@each_model
def test_every_operator_is_in_one_stage_and_after_what_it_needs(graphs: Graphs) -> None:
    """What writes in place comes after all that reads the old value."""
    assert [captured.phase for captured in graphs()] == ["forward", "backward"]
    for captured in graphs():
        assert cut.can_cut(captured.graph.graph) is None
        graph = captured.fresh()
        stage_of = stages(graph)
        nodes = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
        assert set(stage_of) == set(nodes) and len(set(stage_of.values())) >= 3
        order = {node: number for number, node in enumerate(graph.graph.nodes)}
        for node, stage in stage_of.items():
            assert all(stage_of[source] <= stage for source in node.all_input_nodes if source in stage_of), node
            if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
                (target, *_) = node.all_input_nodes
                assert all(stage_of[user] <= stage for user in target.users if order[user] < order[node])
        graph.graph.lint()


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
    layers = 6
    stage_of = stages(capture(Products(layers), torch.randn(32, 64), dynamic=dynamic)[0].fresh(), policy)
    saved = [n for n in stage_of if operators.is_view(n) and all(user.op == "output" for user in n.users)]
    assert len(saved) >= layers
    for view in saved:
        shown = view.all_input_nodes[0]
        readers = [stage for user, stage in stage_of.items() if shown in user.all_input_nodes and user not in saved]
        assert stage_of[view] == (stage_of[shown] if shown in stage_of else min(readers))


def test_constants_do_not_cross_cuts() -> None:
    for captured in constants():
        stage_of = stages(captured.fresh())
        made = [node for node in stage_of if operators.is_creation(node)]
        for node in made:
            assert {stage_of[user] for user in node.users if user in stage_of} <= {stage_of[node]}
        assert captured.phase == "backward" or len(made) >= 4, "one for each stage that uses it"


def test_small_results_are_computed_where_their_input_is() -> None:
    """Bias gradients and the like, so that the large input need not live on."""
    stage_of = stages(transformer(3)[1].fresh())
    sums = [n for n in stage_of if operators.packet_name(n) == "sum"]
    assert sums
    for node in sums:
        sources = [stage_of[s] for s in node.all_input_nodes if s in stage_of]
        assert not sources or stage_of[node] == max(sources)


# -- how finely


def test_a_longer_least_duration_gives_fewer_stages() -> None:
    forward = transformer(5)[0]
    counts = [count(forward.fresh(), CutPolicy(shortest_seconds=seconds)) for seconds in (1e-9, 1e-5, 1e-4, 1e-2, 1)]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[2] > 1 == counts[-1]


def test_a_graph_is_cut_for_the_largest_batch_that_is_promised_whichever_comes_first() -> None:
    layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    policy = CutPolicy(shortest_seconds=1e-3, far_above=math.inf)

    def count_of(rows: int, *, promised: bool) -> int:
        batch = torch.zeros(rows, 256)
        if promised:
            torch._dynamo.mark_dynamic(batch, 0, min=2, max=1 << 16)
        forward, _ = capture(layers, batch, dynamic=None if promised else True)
        return count(forward.fresh(), policy)

    assert count_of(8, promised=True) == count_of(1 << 16, promised=True) > count_of(8, promised=False)


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


def test_what_does_not_fit_otherwise_is_cut_into_more_stages_than_a_graph_has() -> None:
    """A long model has as many stages as a graph may have already."""
    for captured in transformer(3):
        needs = needs_of(captured, fuses=False)
        full = replace(HEAVY, max_stages=len(needs))
        limit = int(0.9 * max(needs))
        assert max(needs_of(captured, fuses=False, most_bytes=limit, policy=full)) <= limit


def needs_of(captured: Captured, *, fuses: bool, most_bytes: int | None = None, policy: CutPolicy = HEAVY) -> list[int]:
    """What each stage needs."""
    compiler = StageCompiler(codegen="eager", policy=policy, fuses=fuses, most_bytes=most_bytes)
    stages = compiler.compile(captured.fresh(), phase="forward", options={}).stages
    return [stage.input_bytes + stage.output_bytes + stage.workspace_bytes for stage in stages]


def test_a_graph_without_known_modules_is_cut_as_finely_as_its_layers_would_be() -> None:
    """As parts of a script after a graph break: all operators could be in one layer, or in many."""
    for captured in transformer(3):
        nameless = captured.fresh()
        for node in nameless.graph.nodes:
            node.meta = {k: v for k, v in node.meta.items() if k not in ("nn_module_stack", "fwd_nn_module_stack")}
        assert count(nameless) >= count(captured.fresh())


def test_layers_are_cut_alike() -> None:
    for captured in transformer(5):
        stage_of = stages(captured.fresh())
        per_layer: dict[str, set[int]] = {}
        for node, stage in stage_of.items():
            layer = cut.layer_of(cut.module_path(node))
            if cost.flops(node) > 0 and layer.startswith("layers."):
                per_layer.setdefault(layer, set()).add(stage)
        counts = [len(found) for found in per_layer.values()]
        assert len(counts) == 5 and len(set(counts[1:-1])) == 1 and 2 <= counts[2] <= 6


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("layers.3.mlp.up", "layers.3"),
        ("encoder.blocks.2.0", "encoder.blocks.2"),
        ("head", "head"),
        ("a.b.c", "a"),
        ("", ""),
        # layers in layers, as of Swin, ConvNeXt and a UNet
        ("layers.0.blocks.1.mlp.fc1", "layers.0.blocks.1"),
        ("encoder.stages.2.layers.7.pwconv1", "encoder.stages.2.layers.7"),
        ("up_blocks.1.attentions.0.transformer_blocks.2.ff.net.0.proj", "up_blocks.1.attentions.0.transformer_blocks.2"),
        # parts of one layer, not layers
        ("layers.3.mlp.experts.5.up", "layers.3"),
        ("layers.3.net.mlp.0", "layers.3"),
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
    return capture(ConvNet(), images(4), images(6), dynamic=True)


@pytest.mark.parametrize("index", [0, 1])
def test_batch_norm_of_any_size(index: int) -> None:
    """Sizes that are read off tensors are computed from those among the inputs instead."""
    captured = convolutions_of_any_size()[index]
    changed = captured.fresh()
    if index == 0:
        assert cut.can_cut(changed.graph), "or this test shows nothing"
    sizes.compute_sizes(changed.graph)
    changed.graph.lint()
    assert cut.can_cut(changed.graph) is None and not any(map(operators.is_read_off, changed.graph.nodes))
    for arguments, expected in zip(captured.arguments, captured.results, strict=True):
        with torch.no_grad():
            found = torch.fx.Interpreter(changed).run(*clones(arguments))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
