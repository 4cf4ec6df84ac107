"""Pieces of a graph: what they take and give, which are equal, which may run again, and what collectives demand of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from runtime.execution import run_plain
from teraio.stages import CutPolicy, cost, cut, operators, split
from teraio.stages import compile as compiling

from .graphs import (
    FINE,
    Captured,
    ConvNet,
    Dropping,
    Layer,
    Transformer,
    capture,
    clones,
    each_model,
    features,
    images,
    programs,
    tokens,
    transformer,
)

WHOLE = CutPolicy(shortest_seconds=1)


def pieces_of(graph: GraphModule, policy: CutPolicy = FINE, *, fuses: bool = False) -> list[split.Subgraph]:
    compiling.describe(graph.graph)
    return split.split(graph, cut.assign(graph.graph, speed=cost.CPU, policy=policy), fuses=fuses)


def operators_of(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


@each_model
def test_pieces_take_and_give_no_more_than_needed(graphs: Callable[[], list[Captured]]) -> None:
    """Each operator is in one of them. Inductor reads the mark of outputs; without it, it lays outputs out as it likes."""
    for captured in graphs():
        graph = captured.fresh()
        pieces = pieces_of(graph)
        whole, *parts = (len(operators_of(each)) for each in (graph.graph, *(piece.module.graph for piece in pieces)))
        assert sum(parts) == whole
        returned = {n for n in graph.graph.output_node().args[0] if isinstance(n, Node)}
        wanted = {n for piece in pieces for n in piece.inputs} | returned
        for piece in pieces:
            piece.module.graph.lint()
            assert set(piece.outputs) <= wanted and len(set(piece.inputs)) == len(piece.inputs)
            assert all(n.users for n in piece.module.graph.nodes if n.op == "placeholder")
            marked = piece.module.graph.output_node().meta["user_visible_output_idxs"]
            assert marked == list(range(len(piece.outputs)))


# -- equal pieces


def test_keys_differ_where_the_code_would() -> None:
    class Scaled(nn.Module):
        def __init__(self, factor: float, width: int = 32) -> None:
            super().__init__()
            self.factor, self.linear = factor, nn.Linear(width, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.factor

    def key(model: nn.Module, x: Tensor) -> str:
        (piece,) = pieces_of(capture(model, x)[0].fresh(), WHOLE)
        return piece.key

    reference = key(Scaled(2.0), features())
    assert key(Scaled(2.0), features()) == reference
    others = {
        "a constant": key(Scaled(2.0000001), features()),
        "a size": key(Scaled(2.0), features(9)),
        "a stride": key(Scaled(2.0), torch.zeros(32, 8).t()),
        "a type": key(Scaled(2.0).double(), features().double()),
        "a width": key(Scaled(2.0, 16), features()[:, :16].contiguous()),
    }
    assert len({reference, *others.values()}) == 1 + len(others), others


# -- operators that carry random state: cut around, counted as the operator inside, shared by equal layers


class Checkpointed(nn.Module):
    """[.., rows, 32] to the same, by a layer that is recomputed, and by numbers that are drawn and are always 1.

    From PyTorch 2.14 on, attention that drops nothing carries no random state.
    """

    def __init__(self, _: int = 0) -> None:
        super().__init__()
        self.layer = Layer(32, 2, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._drawing, x if x.dim() == 3 else x[None], use_reentrant=False)  # type: ignore[no-any-return]

    def _drawing(self, x: Tensor) -> Tensor:
        return self.layer(x) * torch.poisson(torch.zeros_like(x)).exp()  # type: ignore[no-any-return]


@functools.cache
def recomputed(layers: int) -> list[Captured]:
    model = Transformer(layers)
    model.layers = nn.ModuleList(map(Checkpointed, range(layers)))
    return capture(model, tokens())


def test_graphs_are_cut_around_random_state_with_the_same_bits() -> None:
    for captured, program in zip(recomputed(3), programs(recomputed(3)), strict=True):
        carrying = [node for node in captured.nodes() if operators.carries_random_state(node)]
        assert carrying and cut.can_cut(captured.graph.graph) is None
        assert len(program.stages) >= 8 and program.resize is None, "a random state has a fixed size"
        found = run_plain(program, clones(captured.arguments[0]))
        floating = [
            (a, b) for a, b in zip(found, captured.results[0], strict=True) if isinstance(a, Tensor) and a.is_floating_point()
        ]
        assert floating and all(torch.equal(a, b) for a, b in floating)


# -- which forward stages may run again, and why others may not


class Between(nn.Module):
    """Features [rows, 32] to the same: something between two products."""

    def __init__(self, inside: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.inside = nn.Linear(32, 32), nn.Linear(32, 32), inside

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inside(self.up(x)))


def attending(probability: float) -> Callable[[Tensor], Tensor]:
    """Attention that drops with a probability."""

    def attend(x: Tensor) -> Tensor:
        heads = x.view(1, 2, -1, 16)
        return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=probability).reshape(-1, 32)

    return attend


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


def reasons(graph: GraphModule, *, keeps_seeds: bool = False) -> list[str]:
    return split.reasons_against(pieces_of(graph, fuses=keeps_seeds), visible=(), written=())


def reasons_of(model: nn.Module, **settings: bool) -> list[str]:
    return reasons(capture(model, images() if isinstance(model, ConvNet) else features())[0].fresh(), **settings)


def test_stages_that_only_compute_may_run_again() -> None:
    found = reasons(transformer(3)[0].fresh())
    assert len(found) > 6 and not any(found), "attention is tagged as random, but drops nothing"


def test_what_a_graph_writes_in_place_and_what_reads_it() -> None:
    *others, last = reasons_of(ConvNet(2))
    assert last.endswith("in place") and others and not any(others), "the counters of batch norm, in the last stage"
    _, *others, last = reasons_of(Counting())
    assert last.endswith("in place") and others and all("which the graph changes" in reason for reason in others)


def test_random_numbers_are_exact_only_where_their_seeds_are_kept() -> None:
    """The seeds have a stage of their own."""
    forward = capture(Dropping(), features())[0]
    eager, inductor = (reasons(forward.fresh(), keeps_seeds=kept) for kept in (False, True))
    assert [r for r in inductor if r] == ["it draws the seeds of random numbers"]
    assert sum("keeps no seeds" in reason for reason in eager) == 3
    pieces = pieces_of(forward.fresh())
    first, *others = [operators_of(piece.module.graph) for piece in pieces]
    assert len(first) == 1 and operators.draws_seeds(first[0])
    assert sum(node.target is torch.ops.prims.inductor_random.default for nodes in others[:2] for node in nodes) < 3


@torch.library.custom_op("recompute_test::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


double.register_fake(torch.empty_like)
double.register_autograd(lambda context, gradient: gradient * 2)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Between(attending(0.0)), None),
        (Between(attending(0.5)), "random"),
        (Checkpointed(), "it has an operator that carries random state"),
        (Between(double), "the custom operator recompute_test.double"),
    ],
)
def test_operators_that_may_not_run_again(model: nn.Module, reason: str | None) -> None:
    found = "\n".join(reasons_of(model, keeps_seeds=True)).strip()
    assert found == "" if reason is None else reason in found


def test_what_reads_what_others_change_may_not() -> None:
    pieces = pieces_of(transformer(3)[0].fresh())
    shown, changed = pieces[2].inputs[-1], pieces[3].inputs[0]
    found = split.reasons_against(pieces, visible=[shown], written=[changed])
    assert found[2] == f"it reads {shown.name}, a result that user code can change"
    assert found[3] == f"it reads {changed.name}, which the graph changes"


# -- collectives: their order does not depend on sizes, and each is waited for in the stage that launches it

collective = torch.ops._c10d_functional
FINEST = CutPolicy(shortest_seconds=1e-9, far_above=1e-6)
Combine = Callable[["Weights", Tensor], Tensor]


class Weights(nn.Module):
    """[rows, 512] to the same, by `combine` and three weights."""

    def __init__(self, combine: Combine) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(512, 512, bias=False).requires_grad_(False) for _ in range(3))
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        return self.combine(self, x)


def reduced(x: Tensor, how: str) -> Tensor:
    return collective.all_reduce(x, how, dist.group.WORLD.group_name)


def two(model: Weights, x: Tensor) -> Tensor:
    """The second collective could begin long before the first one."""
    early = model.first(x)
    total = collective.wait_tensor(reduced(model.second(early), "sum"))
    largest = collective.wait_tensor(reduced(early.relu(), "max"))
    return model.third(total) + largest


def overlapped(model: Weights, x: Tensor) -> Tensor:
    """A collective runs while other work is done."""
    begun = reduced(model.first(x), "sum")
    other = torch.tanh(model.second(x).exp() + x.sin())
    return model.third(other) + collective.wait_tensor(begun)


def never_waited_for(model: Weights, x: Tensor) -> Tensor:
    return model.second(reduced(model.first(x), "sum") + 1)


def graph_of(combine: Combine, rows: int) -> GraphModule:
    (captured,) = capture(Weights(combine), torch.randn(rows, 512), loss=False)
    return captured.fresh()


def waits(graph: GraphModule) -> Sequence[Node]:
    return [node for node in graph.graph.nodes if operators.is_wait(node)]


@pytest.mark.parametrize("policy", [FINE, FINEST])
def test_ranks_with_other_sizes_launch_collectives_in_the_same_order(policy: CutPolicy, group: None) -> None:
    orders = []
    for rows in (600, 500):  # results of more than 1 MiB, and of less
        pieces = pieces_of(graph_of(two, rows), policy)
        assert len(pieces) >= 3
        orders.append([str(n.args[1]) for p in pieces for n in p.module.graph.nodes if operators.is_launch(n)])
    assert orders == [["sum", "max"]] * 2


@pytest.mark.parametrize("policy", [FINE, FINEST])
def test_a_collective_is_waited_for_in_the_stage_that_launches_it(policy: CutPolicy, group: None) -> None:
    graph = graph_of(overlapped, 600)
    stage_of = cut.assign(graph.graph, speed=cost.CPU, policy=policy)
    (wait,) = waits(graph)
    assert len(set(stage_of.values())) >= 3 and operators.is_view(wait), "its result is no memory of its own"
    assert stage_of[wait] == stage_of[operators.launch_of(wait)] < max(stage_of.values())


def test_what_is_not_waited_for_gets_a_wait(group: None) -> None:
    graph = graph_of(never_waited_for, 16)
    assert not waits(graph)
    for _ in range(2):  # the second time changes nothing
        compiling.wait_for_all(graph.graph)
        (wait,) = waits(graph)
        assert operators.is_launch(operators.launch_of(wait))
