"""Real forward and backward graphs of small models, with the arguments and results of a run of each; and programs of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional

from runtime.execution import Phase, Program
from teraio.stages import Codegen, CutPolicy, StageCompiler

from ..parity.models import ConvNet, Layer

FINE = CutPolicy(shortest_seconds=1e-9)
HEAVY = CutPolicy(shortest_seconds=1e-9, far_above=math.inf)
"""Cut before heavy operators only, however much memory a stage needs."""


@dataclass(slots=True, kw_only=True)
class Captured:
    """A graph as the backend gets it. arguments, results: one pair for every run, copied before it could change them."""

    graph: GraphModule
    phase: Phase
    arguments: list[list[Any]]
    results: list[list[Any]]

    def nodes(self) -> list[Node]:
        """All operators."""
        return [n for n in self.graph.graph.nodes if n.op not in ("placeholder", "output")]

    def fresh(self) -> GraphModule:
        """A copy of the graph, to be changed by whoever wants."""
        twin, twins = Graph(), dict[Node, Node]()
        for node in self.graph.graph.nodes:
            twins[node] = twin.node_copy(node, twins.__getitem__)
        return GraphModule(self.graph, twin)


def capture(
    model: nn.Module,
    *batches: Tensor,
    dynamic: bool | None = False,
    loss: bool = True,
    decompositions: dict[Any, Any] | None = None,
) -> list[Captured]:
    """Run `model` on the batches under torch.compile (forward and backward of the sum, or of its first result) and keep its
    graphs."""
    torch._dynamo.reset()
    captured: list[Captured] = []

    def keep(graph: GraphModule, inputs: Sequence[Any], **settings: Any) -> Callable[[list[Any]], list[Any]]:
        phase: Phase = "backward" if settings.get("is_backward") else "forward"
        found = Captured(graph=graph, phase=phase, arguments=[], results=[])
        captured.append(found)

        def run(arguments: list[Any]) -> list[Any]:
            found.arguments.append(clones(arguments))
            with torch.no_grad():
                results = list(torch.fx.Interpreter(graph).run(*arguments))
            arguments.clear()
            found.results.append(clones(results))
            return results

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(graph: GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_fx(graph, inputs, inner_compile=keep, decompositions=decompositions)

    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    for batch in batches:
        result = compiled(batch)
        if loss:
            (result[0] if isinstance(result, tuple) else result).sum().backward()
    torch._dynamo.reset()
    return captured


def clones(values: Sequence[Any]) -> list[Any]:
    """Copies with the same sizes and strides; what shares a storage still does."""
    storages: dict[int, torch.UntypedStorage] = {}

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        old = value.untyped_storage()
        if old._cdata not in storages:
            storages[old._cdata] = old.clone()
        empty = torch.empty(0, dtype=value.dtype)
        return empty.set_(storages[old._cdata], value.storage_offset(), value.size(), value.stride())

    return [one(value) for value in values]


def same(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Whether all values are the same, bit for bit and by type and stride."""

    def one(a: Any, b: Any) -> bool:
        if not isinstance(a, Tensor):
            return bool(a == b)
        return torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype

    return len(found) == len(wanted) and all(map(one, found, wanted))


def programs(graphs: Sequence[Captured], policy: CutPolicy = FINE, codegen: str | Codegen = "eager") -> list[Program]:
    """Of one compiler."""
    return programs_by(StageCompiler(codegen=codegen, policy=policy), graphs)


def programs_by(compiler: StageCompiler, graphs: Sequence[Captured]) -> list[Program]:
    return [compiler.compile(captured.fresh(), phase=captured.phase, options={}) for captured in graphs]


class Transformer(nn.Module):
    """Tokens [batch, time] to logits [batch, time, vocabulary]."""

    def __init__(self, layers: int, width: int = 32, *, heads: int = 2, vocabulary: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, 0.0) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None] * 0.01
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Dropping(nn.Module):
    """Features [rows, 32] to the same, through layers with dropout."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.dropout(torch.tanh(layer(x)), 0.3)
        return x


class Embedded(nn.Module):
    """An embedding in 16 bits, whose gradient is many times as large as all else in its stage: words to the mean square."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 64, dtype=torch.bfloat16)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.words(numbers).float().square().mean()


class WithLoss(Transformer):
    """Tokens [batch, time] to the loss of predicting them, over a vocabulary that is much larger than the width."""

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.cross_entropy(super().forward(tokens).flatten(0, 1), tokens.flatten())


@functools.cache
def transformer(layers: int) -> list[Captured]:
    """Forward and backward; captured once for all tests, so never changed by them."""
    return capture(Transformer(layers), tokens())


@functools.cache
def transformer_of_any_size() -> list[Captured]:
    """Forward and backward with symbolic sizes, run with two sizes."""
    return capture(Transformer(2), tokens(2, 16), tokens(3, 24), dynamic=True)


@functools.cache
def convolutions() -> list[Captured]:
    return capture(ConvNet(2), images())


@functools.cache
def with_loss() -> list[Captured]:
    return capture(WithLoss(2, vocabulary=512), tokens(4, 16))


def three_layers() -> list[Captured]:
    return transformer(3)


each_model = pytest.mark.parametrize("graphs", [three_layers, convolutions, with_loss])


def tokens(batch: int = 2, time: int = 16) -> Tensor:
    return torch.randint(0, 64, (batch, time), generator=torch.Generator().manual_seed(0))


def images(batch: int = 4) -> Tensor:
    return torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def features(rows: int = 8) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(0))
