"""Real forward and backward graphs of small models, with the arguments and results of a run of each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional

from runtime.execution import Phase


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


def capture(model: nn.Module, *batches: Tensor, dynamic: bool = False, loss: bool = True) -> list[Captured]:
    """Run `model` on the batches under torch.compile (forward and backward of the sum) and keep its graphs."""
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
        return compile_fx(graph, inputs, inner_compile=keep)

    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    for batch in batches:
        result = compiled(batch)
        if loss:
            result.sum().backward()
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


class Layer(nn.Module):
    """Transformer layer: [batch, time, width] to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (part.view(batch, time, 2, width // 2).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Tokens [batch, time] to logits [batch, time, 64]."""

    def __init__(self, layers: int, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + torch.arange(x.shape[1], dtype=x.dtype)[:, None] * 0.01
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class ConvNet(nn.Module):
    """Images [batch, 3, 16, 16] to [batch, 10], with batch norm's buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.norm2 = nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.BatchNorm2d(16)
        self.last = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.first(x)))
        x = torch.relu(self.norm2(self.second(x)))
        return self.last(x.mean(dim=(2, 3)))


class Masked(nn.Module):
    """A constant that several stages use: features [rows, 32] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((32,), 0.5, dtype=x.dtype)
        for layer in self.layers:
            x = torch.tanh(layer(x)) * mask
        return x + mask


class WithLoss(nn.Module):
    """Tokens [batch, time] to the loss of predicting the next one, over a vocabulary that is much larger than the width."""

    def __init__(self, vocabulary: int = 512, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


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
    return capture(ConvNet(), images())


@functools.cache
def constants() -> list[Captured]:
    return capture(Masked(), features())


@functools.cache
def with_loss() -> list[Captured]:
    return capture(WithLoss(), tokens(4, 16))


MODELS = {"transformer": lambda: transformer(3), "convolutions": convolutions, "constants": constants, "loss": with_loss}


def tokens(batch: int = 2, time: int = 16) -> Tensor:
    return torch.randint(0, 64, (batch, time), generator=torch.Generator().manual_seed(0))


def images(batch: int = 4) -> Tensor:
    return torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def features(rows: int = 8) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(0))
