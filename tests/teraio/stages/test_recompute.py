"""Which forward stages may run again, and the reason why others may not."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from teraio.stages.compile import StageCompiler
from teraio.stages.cost import CPU
from teraio.stages.cut import CutPolicy, assign
from teraio.stages.operators import draws_seeds
from teraio.stages.prepare import describe
from teraio.stages.repeatable import reasons_against
from teraio.stages.split import Subgraph, split

from .graphs import Captured, ConvNet, Layer, capture, features, images, transformer

FINE = CutPolicy(shortest_seconds=1e-9)


class Dropping(nn.Module):
    """Features [rows, 32] to the same, through layers with dropout."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.dropout(torch.tanh(layer(x)), 0.3)
        return x


class Attending(nn.Module):
    """Attention that drops with a probability: tokens' features [rows, 32] to the same."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.up, self.down, self.probability = nn.Linear(32, 32), nn.Linear(32, 32), probability

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).view(1, 2, -1, 16)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=self.probability)
        return self.down(mixed.reshape(-1, 32))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(32)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x[None], use_reentrant=False)


@functools.cache
def forward(make: type[nn.Module], *arguments: float) -> Captured:
    return capture(make(*arguments), images() if make is ConvNet else features())[0]


def pieces(graph: GraphModule) -> list[Subgraph]:
    describe(graph.graph)
    return split(graph, assign(graph.graph, speed=CPU, policy=FINE))


def reasons(captured: Captured, *, keeps_seeds: bool = False, visible: Sequence[Node] = ()) -> list[str]:
    return reasons_against(pieces(captured.fresh()), visible=visible, written=(), keeps_seeds=keeps_seeds)


def test_stages_that_only_compute_may_run_again() -> None:
    found = reasons(transformer(2)[0])
    assert len(found) > 6 and not any(found), "attention is tagged as random, but drops nothing"


def test_only_the_last_stage_changes_the_counters_of_batch_norm() -> None:
    *others, last = reasons(forward(ConvNet))
    assert last.endswith("in place") and others and not any(others)


class Counting(nn.Module):
    """Features [rows, 32] to the same, by weights that depend on a buffer that the graph changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.register_buffer("scale", torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + self.scale
        self.scale += 1
        return x


def test_what_reads_a_buffer_that_the_graph_changes_may_not() -> None:
    *others, last = reasons(forward(Counting))
    assert last.endswith("in place") and others and all("which the graph changes" in reason for reason in others[1:])


def test_random_numbers_are_exact_only_where_their_seeds_are_kept() -> None:
    eager, inductor = (reasons(forward(Dropping), keeps_seeds=kept) for kept in (False, True))
    assert [r for r in inductor if r] == ["it draws the seeds of random numbers"]
    assert sum("keeps no seeds" in reason for reason in eager) == 3


def test_the_seeds_have_a_stage_of_their_own() -> None:
    first, *others = pieces(forward(Dropping).fresh())
    operators = [[n for n in piece.module.graph.nodes if n.op == "call_function"] for piece in (first, *others)]
    assert len(operators[0]) == 1 and draws_seeds(operators[0][0])
    assert sum(node.target is torch.ops.prims.inductor_random.default for nodes in operators[1:3] for node in nodes) < 3


@pytest.mark.parametrize("probability", [0.0, 0.5])
def test_attention_may_if_it_drops_nothing(probability: float) -> None:
    found = reasons(forward(Attending, probability), keeps_seeds=True)
    assert any(found) == (probability > 0), found


def test_operators_with_random_state_may_not() -> None:
    found = reasons(forward(Checkpointed))
    assert "it has an operator that carries random state" in found


def test_inputs_are_named_as_the_user_knows_them() -> None:
    captured = forward(ConvNet)
    names = [f"input {number}" for number in range(30)]
    program = StageCompiler(codegen="eager", policy=FINE).compile(
        captured.fresh(), phase="forward", options={}, inputs=[(name, "buffer") for name in names[:12]]
    )
    assert any(stage.never_again.startswith("it writes input ") for stage in program.stages)


def test_what_reads_a_result_of_the_user_may_not() -> None:
    graph = transformer(2)[0].fresh()
    parts = pieces(graph)
    shown = parts[2].inputs[-1]
    found = reasons_against(parts, visible=[shown], written=(), keeps_seeds=True)
    assert found[2] == f"it reads {shown.name}, a result that user code can change"


def test_what_reads_an_input_that_pytorch_changes_later_may_not() -> None:
    parts = pieces(transformer(2)[0].fresh())
    changed = parts[3].inputs[0]
    found = reasons_against(parts, visible=(), written=[changed], keeps_seeds=True)
    assert found[3] == f"it reads {changed.name}, which the graph changes"


@torch.library.custom_op("recompute_test::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


@double.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


double.register_autograd(lambda context, gradient: gradient * 2)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(double(self.up(x)))


def test_custom_operators_may_not() -> None:
    assert any("the custom operator recompute_test.double" in reason for reason in reasons(forward(Custom)))


def test_only_stages_of_forward_graphs_are_judged() -> None:
    compiler = StageCompiler(codegen="eager", policy=FINE)
    for captured in capture(Dropping(), features()):
        program = compiler.compile(captured.fresh(), phase=captured.phase, options={})
        assert any(stage.never_again for stage in program.stages) == (captured.phase == "forward")
