"""Operators that carry random state: cut around, counted as the operator inside, shared by equal layers."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch._prims import rng_prims
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint

from runtime.execution import run_plain
from teraio.stages import cost, operators
from teraio.stages.compile import StageCompiler
from teraio.stages.cut import CutPolicy, can_cut
from teraio.stages.operators import carries_random_state, unwrapped
from teraio.stages.prepare import describe

from .graphs import Captured, Layer, Transformer, capture, clones, tokens

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Recomputed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


@functools.cache
def graphs(layers: int) -> list[Captured]:
    """Forward and backward of a transformer whose layers are recomputed."""
    model = Transformer(layers)
    model.layers = nn.ModuleList(Recomputed(Layer(32)) for _ in range(layers))
    return capture(model, tokens())


def test_graphs_are_cut_around_them_with_the_same_bits() -> None:
    compiler = StageCompiler(codegen="eager", policy=CutPolicy(shortest_seconds=1e-9))
    for captured in graphs(2):
        assert any(map(carries_random_state, captured.nodes()))
        assert can_cut(captured.graph.graph) is None
        program = compiler.compile(captured.fresh(), phase=captured.phase, options={})
        assert len(program.stages) >= 8
        assert program.resize is None, "a random state has a fixed size"
        found = run_plain(program, clones(captured.arguments[0]))
        floating = [
            (a, b) for a, b in zip(found, captured.results[0], strict=True) if isinstance(a, Tensor) and a.is_floating_point()
        ]
        assert floating and all(torch.equal(a, b) for a, b in floating)


def test_equal_layers_share_their_stages() -> None:
    counts = []
    for layers in (3, 4):
        compiler = StageCompiler(codegen="eager", policy=CutPolicy(shortest_seconds=1e-9))
        for captured in graphs(layers):
            compiler.compile(captured.fresh(), phase=captured.phase, options={})
        counts.append(compiler.distinct_stages)
    assert counts[0] == counts[1]


def test_they_are_described_like_the_operator_inside() -> None:
    for captured in graphs(2):
        graph = captured.fresh().graph
        describe(graph)
        for node in filter(carries_random_state, graph.nodes):
            assert unwrapped(node)[0] is ATTENTION
            assert cost.flops(node) > 0
            shapes = [tuple(t.shape) for t in operators.fake_tensors(node.meta["val"])]
            assert shapes[-2:] == [(2, 2, 16, 16), (2, 2, 16)]
            assert any(key in node.meta for key in ("nn_module_stack", "fwd_nn_module_stack"))


def test_the_operator_inside_each_of_the_three() -> None:
    graph = Graph()
    x, state = graph.placeholder("x"), graph.placeholder("state")
    bernoulli = torch.ops.aten.bernoulli.p
    made = [
        graph.call_function(rng_prims.run_and_save_rng_state, (bernoulli, x, 0.5)),
        graph.call_function(rng_prims.run_with_rng_state, (state, bernoulli, x, 0.5)),
        graph.call_function(rng_prims.graphsafe_run_with_rng_state, (bernoulli, x, 0.5), {"rng_state": state}),
        graph.call_function(bernoulli, (x, 0.5)),
    ]
    assert [carries_random_state(node) for node in made] == [True, True, True, False]
    for node in made:
        operator, arguments, named = unwrapped(node)
        assert (operator, tuple(arguments), dict(named)) == (bernoulli, (x, 0.5), {})
    graph.output(tuple(made))
    assert can_cut(graph) is None
