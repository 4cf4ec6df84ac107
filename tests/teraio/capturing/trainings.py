"""Small trainings as captures take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..stages.graphs import Layer, Transformer


def transformer(width: int = 512, layers: int = 1) -> Transformer:
    return Transformer(layers, width, heads=8, vocabulary=1000)


def tokens(rows: int = 8, **where: Any) -> Tensor:
    return torch.zeros(rows, 256, dtype=torch.long, **where)


def loss_of(logits: Tensor) -> Tensor:
    rows = logits.flatten(0, 1)
    return functional.cross_entropy(rows, torch.zeros(len(rows), dtype=torch.long, device=rows.device))


def stepping(passes: Callable[..., object], optimizer: torch.optim.Optimizer) -> Callable[..., None]:
    """A step: the passes, the update, and gradients are gone."""

    def step(*given: int) -> None:
        passes(*given)
        optimizer.step()
        optimizer.zero_grad()

    return step


def training(
    options: Mapping[str, Any] | None = None, *, width: int = 512, layers: int = 1, rows: int = 8
) -> Callable[[], object]:
    model, given = transformer(width, layers), tokens(rows)
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(model, backend="teraio", options=dict(options or {}))
    return stepping(lambda: loss_of(compiled(given)).backward(), optimizer)


def two_layers(options: Mapping[str, Any] | None = None) -> Callable[[], object]:
    return training(options, layers=2, rows=4)


def on_gpu(*, autocast: bool = False, fused: bool | None = True) -> Callable[[], object]:
    """The same on "cuda", if there is a GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, given = transformer().to(device), tokens(device=device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    compiled = torch.compile(model, backend="teraio")

    def passes() -> None:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            logits = compiled(given)
        loss_of(logits.float()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return stepping(passes, optimizer)


def on_gpu_as(what: str) -> Callable[[], object]:
    """A layer on "cuda" with "constants" made from numbers, with attention that drops and is "checkpointed", or with a "scan"."""
    with torch.device("cuda"):
        torch.tensor(1.0)  # as many constructors do
        layer = Layer(512, heads=8, dropped=0.1 if what == "checkpointed" else 0.0).to(torch.bfloat16)
        hidden = torch.zeros(2, 256, 512, dtype=torch.bfloat16)

    @torch.compile(backend="teraio")
    def run(hidden: Tensor) -> Tensor:
        if what == "checkpointed":
            return checkpoint(layer, hidden, use_reentrant=False)
        if what == "scan":
            return associative_scan(torch.add, layer(hidden), dim=1)
        return layer(hidden) * torch.tensor(2.0, device=hidden.device)

    return stepping(lambda: run(hidden).sum().backward(), torch.optim.AdamW(layer.parameters()))


def only_asks() -> Callable[[], object]:
    """Its own code reads and makes no data. A million weights on "cuda", with AdamW, fused."""
    layer = nn.Linear(1024, 1024, bias=False, device="cuda")
    run = torch.compile(lambda hidden: layer(hidden).sum(), backend="teraio")
    optimizer, hidden = torch.optim.AdamW(layer.parameters(), fused=True), torch.zeros(64, 1024, device="cuda")

    def passes() -> None:
        with torch.profiler.record_function("step"):
            loss = run(hidden)
        assert loss.device.type == hidden.t().detach().device.type and torch.empty_like(hidden).shape == hidden.shape
        loss.backward()

    return stepping(passes, optimizer)


class Mixer(nn.Module):
    """Attention of 4 heads between matmuls; keeps the width of 256."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(256, 768), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv(hidden).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        hidden = hidden + functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return hidden + self.down(functional.gelu(self.up(hidden)))


def mixers(checkpointed: str) -> Callable[[], object]:
    """Three of them in bf16 on 4 rows of 256 places, on "cuda".

    checkpointed: "inside" or "outside" of compiled graphs, an "eager" one between compiled ones, or "nothing".
    """
    device = "cuda"
    layers = [Mixer().to(device, torch.bfloat16) for _ in range(3)]
    given = torch.zeros(4, 256, 256, device=device, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW((weight for layer in layers for weight in layer.parameters()), fused=True)

    def again(layer: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        return checkpoint(layer, hidden, use_reentrant=False)

    def of(layer: Mixer) -> Callable[[Tensor], Tensor]:
        if checkpointed == "eager" and layer is layers[1]:
            return lambda hidden: again(layer, hidden)
        if checkpointed == "inside":
            return torch.compile(lambda hidden: again(layer, hidden), backend="teraio")
        compiled = torch.compile(layer, backend="teraio")
        return (lambda hidden: again(compiled, hidden)) if checkpointed == "outside" else compiled

    run = [of(layer) for layer in layers]

    def passes() -> None:
        hidden = given
        for layer in run:
            hidden = layer(hidden)
        hidden.square().mean().backward()

    return stepping(passes, optimizer)


class ReadsValues(nn.Module):
    """Its constructor reads values, as those of timm's models do: rates, a table that it writes, a size."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.zeros(4)
        table[1:] = 3 * torch.arange(1, 4)
        rates = torch.linspace(0, 0.3, 4).tolist()
        width = int(table.sum()) * 32
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Dropout(rate)) for rate in rates)
        assert [round(rate, 6) for rate in rates] == [0, 0.1, 0.2, 0.3] and torch.equal(table.flip(0)[:1], torch.tensor([9.0]))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def reads_values() -> Callable[[], object]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, given = ReadsValues().to(device), torch.zeros(8, 576, device=device)
    compiled = torch.compile(model, backend="teraio")
    return stepping(lambda: compiled(given).sum().backward(), torch.optim.AdamW(model.parameters()))


def needs_a_driver() -> Callable[[], object]:
    model = torch.compile(nn.Linear(4, 4, device="cuda"), backend="teraio")

    def step() -> None:
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        torch.cuda.current_stream()

    return step


def reads_the_loss() -> Callable[[], object]:
    model = torch.compile(nn.Linear(4, 4), backend="teraio")

    def step() -> None:
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        if loss.item() > 0:
            print("the loss is positive")

    return step


def compiles_nothing() -> Callable[[], object]:
    model = nn.Linear(4, 4)
    return stepping(lambda: model(torch.ones(2, 4)).sum().backward(), torch.optim.SGD(model.parameters(), lr=0.1))


def of_lengths(*, dynamic: bool = True) -> Callable[[int], None]:
    """The step takes a length. Graphs are compiled for a batch of 256."""
    model = Transformer(1, 64, heads=2, vocabulary=500)
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(model, backend="teraio", dynamic=dynamic)
    begun: list[int] = []

    def passes(length: int) -> None:
        given = torch.zeros(64, length if begun else 256, dtype=torch.long)
        begun.append(length)
        loss_of(compiled(given)).backward()

    return stepping(passes, optimizer)


def in_passes(times: int) -> Callable[[], object]:
    """Two layers of 16 MiB each; their gradients add up."""
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(2)])
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(model, backend="teraio", options={"codegen": "eager"})

    def passes() -> None:
        for _ in range(times):
            compiled(torch.zeros(64, 2048)).sum().backward()

    return stepping(passes, optimizer)
