"""Pieces of a graph: together they compute what the graph does, and equal ones are told by their keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Node

from teraio.stages import operators
from teraio.stages.cost import CPU
from teraio.stages.cut import CutPolicy, assign
from teraio.stages.split import Subgraph, split

from .graphs import MODELS, Captured, capture, clones, constants, features, transformer, transformer_of_any_size

FINE = CutPolicy(shortest_seconds=1e-9)
FREE = CutPolicy(shortest_seconds=1e-9, max_stages=1 << 20)
"""Cuts wherever a layer has room for a cut, however deep the model is."""


def pieces_of(captured: Captured, policy: CutPolicy = FINE) -> tuple[Any, list[Subgraph]]:
    """A copy of the graph and its pieces."""
    graph = captured.fresh()
    return graph, split(graph, assign(graph.graph, speed=CPU, policy=policy))


def run(graph: Any, pieces: list[Subgraph], arguments: list[Any]) -> list[Any]:
    """The graph's results, piece after piece. Changes the arguments as the graph does."""
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    values: dict[Node, Any] = dict(zip(placeholders, arguments, strict=True))
    with torch.no_grad():
        for piece in pieces:
            results = piece.module(*[values[n] for n in piece.inputs])
            values.update(zip(piece.outputs, results, strict=True))
    (output,) = (n for n in graph.graph.nodes if n.op == "output")
    return [values[r] if isinstance(r, Node) else r for r in output.args[0]]


def same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    return torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype


@pytest.fixture(scope="module", params=MODELS)
def graphs(request: pytest.FixtureRequest) -> list[Captured]:
    return MODELS[request.param]()


@pytest.mark.parametrize("seconds", [1e-9, 1e-6, 1])
def test_pieces_compute_what_the_graph_does(graphs: list[Captured], seconds: float) -> None:
    for captured in graphs:
        graph, pieces = pieces_of(captured, CutPolicy(shortest_seconds=seconds))
        arguments = clones(captured.arguments[0])
        found = run(graph, pieces, arguments)
        assert len(found) == len(captured.results[0]) and all(map(same, found, captured.results[0]))


def test_every_operator_is_in_one_piece(graphs: list[Captured]) -> None:
    for captured in graphs:
        graph, pieces = pieces_of(captured)
        wanted = sum(n.op not in ("placeholder", "output") for n in graph.graph.nodes)
        found = [n for p in pieces for n in p.module.graph.nodes if n.op not in ("placeholder", "output")]
        assert len(found) == wanted
        for piece in pieces:
            piece.module.graph.lint()


def test_pieces_take_and_give_no_more_than_needed(graphs: list[Captured]) -> None:
    for captured in graphs:
        graph, pieces = pieces_of(captured)
        (output,) = (n for n in graph.graph.nodes if n.op == "output")
        wanted = {n for piece in pieces for n in piece.inputs} | {n for n in output.args[0] if isinstance(n, Node)}
        for piece in pieces:
            assert set(piece.outputs) <= wanted
            assert len(set(piece.inputs)) == len(piece.inputs)
            unused = [n for n in piece.module.graph.nodes if n.op == "placeholder" and not n.users]
            assert not unused


def test_all_outputs_of_a_piece_keep_their_strides(graphs: list[Captured]) -> None:
    """Inductor reads this mark; without it, it lays outputs out as it likes."""
    for captured in graphs:
        for piece in pieces_of(captured)[1]:
            (output,) = (n for n in piece.module.graph.nodes if n.op == "output")
            assert output.meta["user_visible_output_idxs"] == list(range(len(piece.outputs)))


def test_splitting_changes_nothing() -> None:
    for captured in constants():
        graph = captured.fresh()
        stage_of = assign(graph.graph, speed=CPU, policy=FINE)
        before = str(graph.graph)
        split(graph, stage_of)
        assert str(graph.graph) == before


# -- keys


def distinct(layers: int) -> list[int]:
    """Number of distinct keys of the forward and of the backward graph."""
    return [len({p.key for p in pieces_of(c, FREE)[1]}) for c in transformer(layers)]


def test_the_number_of_distinct_pieces_does_not_grow_with_depth() -> None:
    counts = [len(pieces_of(c, FREE)[1]) for c in transformer(5)]
    small, large = distinct(3), distinct(5)
    assert small == large
    assert all(d < count * 0.7 for d, count in zip(large, counts, strict=True))


def test_keys_differ_where_the_code_would() -> None:
    class Scaled(nn.Module):
        def __init__(self, factor: float, width: int = 32) -> None:
            super().__init__()
            self.factor, self.linear = factor, nn.Linear(width, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.factor

    def key(model: nn.Module, x: torch.Tensor) -> str:
        (piece,) = pieces_of(capture(model, x)[0], CutPolicy(shortest_seconds=1))[1]
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


# -- symbolic sizes


def test_pieces_with_symbolic_sizes() -> None:
    forward, backward = transformer_of_any_size()
    for captured in (forward, backward):
        assert len(captured.arguments) == 2, "compiled once for both sizes"
        graph, pieces = pieces_of(captured)
        assert len(pieces) > 5
        for arguments, results in zip(captured.arguments, captured.results, strict=True):
            found = run(graph, pieces, clones(arguments))
            assert all(map(same, found, results)) and len(found) == len(results)


def test_sizes_are_computed_again_rather_than_handed_on() -> None:
    for captured in transformer_of_any_size():
        for piece in pieces_of(captured)[1]:
            assert not any(operators.is_size(node) for node in piece.inputs)


# -- names


def test_paths() -> None:
    paths = [p.path for c in transformer(3) for p in pieces_of(c)[1]]
    assert {"layers.1.up", "layers.1.down"} <= set(paths) or any("layers.1." in p for p in paths)
    assert all(p and p != "root" for p in paths)
    (whole,) = pieces_of(transformer(3)[0], CutPolicy(shortest_seconds=1))[1]
    assert whole.path == "layers.0..head"
