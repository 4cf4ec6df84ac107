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


def transformer(width: int = 512) -> Transformer:
    return Transformer(1, width, heads=8, vocabulary=1000)


def tokens(**where: Any) -> Tensor:
    return torch.zeros(8, 256, dtype=torch.long, **where)


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


def training(options: Mapping[str, Any] | None = None, *, width: int = 512) -> Callable[[], object]:
    model, given = transformer(width), tokens()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(model, backend="teraio", options=dict(options or {}))
    return stepping(lambda: loss_of(compiled(given)).backward(), optimizer)


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
    """A layer on "cuda" with "constants" of numbers, that drops and is "checkpointed", with a "scan", or run again "outside"."""
    with torch.device("cuda"):
        torch.tensor(1.0)  # as many constructors do
        layer = Layer(512, 8, 0.1 if what == "checkpointed" else 0.0).to(torch.bfloat16)
        hidden = torch.zeros(2, 256, 512, dtype=torch.bfloat16)

    @torch.compile(backend="teraio")
    def run(hidden: Tensor) -> Tensor:
        if what == "checkpointed":
            return checkpoint(layer, hidden, use_reentrant=False)
        if what == "scan":
            return associative_scan(torch.add, layer(hidden), dim=1)
        return layer(hidden) * torch.tensor(2.0, device=hidden.device)

    def passes() -> None:
        (checkpoint(run, hidden, use_reentrant=False) if what == "outside" else run(hidden)).sum().backward()

    return stepping(passes, torch.optim.AdamW(layer.parameters()))


def only_asks() -> Callable[[], object]:
    """Its own code reads and makes no data."""
    layer, hidden = nn.Linear(1024, 1024, bias=False, device="cuda"), torch.zeros(64, 1024, device="cuda")
    run = torch.compile(lambda hidden: layer(hidden).sum(), backend="teraio")

    def passes() -> None:
        with torch.profiler.record_function("step"):
            loss = run(hidden)
        assert loss.device.type == hidden.t().detach().device.type and torch.empty_like(hidden).shape == hidden.shape
        loss.backward()

    return stepping(passes, torch.optim.AdamW(layer.parameters(), fused=True))


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


def reads_what_is_drawn() -> Callable[[], object]:
    rates = torch.linspace(0, 1, 3)
    last = rates[2:]
    assert last.item() == 1.0, "this is known"
    rates.mul_(torch.rand(3))
    assert last.item() < 1.0, "this is not"
    return nn.Linear(1, 1)


def compiles_with_two_options() -> Callable[[], object]:
    models = [torch.compile(nn.Linear(4, 4), backend="teraio", options={"recompute": each}) for each in ("auto", "off")]
    return lambda: [model(torch.ones(2, 4)).sum().backward() for model in models]


def compiles_and_never_updates() -> Callable[[], object]:
    model = torch.compile(nn.Linear(4, 4), backend="teraio")
    return lambda: model(torch.ones(2, 4)).sum().backward()


def compiles_nothing() -> Callable[[], object]:
    model = nn.Linear(4, 4)
    return stepping(lambda: model(torch.ones(2, 4)).sum().backward(), torch.optim.SGD(model.parameters(), lr=0.1))


def of_lengths(*, dynamic: bool = True, layers: int = 1) -> Callable[[int], None]:
    """The step takes a length. Graphs are compiled for a batch of 256."""
    model = Transformer(layers, 64, heads=2, vocabulary=500)
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
