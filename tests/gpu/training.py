"""Small models, and one training loop that everything about them is compared with bit for bit; on any device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import teraio
from runtime.paging.block import State
from teraio import registry

MIB = 1 << 20
STEPS = 10
"""One or two compile, two are profiled, one more is needed to know their times, and two to switch to the plan."""
_PLANNED_STEPS = 3
TABLE_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large the models are. rows: of a batch; width, layers: of the model; heads: of the attention."""

    rows: int
    width: int
    layers: int
    heads: int = 8
    sequence: int = 256


GPU_SCALE = Scale(rows=4096, width=512, layers=16)
"""In fp32 activations of 8 and 32 MiB, weights of 4 MiB; one to two GiB in all."""


class Feedforward(nn.Module):
    """Residual layer of two products, with dropout."""

    def __init__(self, scale: Scale, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(scale.width)
        self.up, self.down = nn.Linear(scale.width, 4 * scale.width), nn.Linear(4 * scale.width, scale.width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        return x + self.down(nn.functional.dropout(hidden, self.dropout, self.training))


class Attention(nn.Module):
    """Residual self-attention in plain operators: fused ones are not deterministic on every device."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.scale = scale
        self.norm = nn.LayerNorm(scale.width)
        self.all, self.out = nn.Linear(scale.width, 3 * scale.width), nn.Linear(scale.width, scale.width)

    def forward(self, x: Tensor) -> Tensor:
        heads, size = self.scale.heads, self.scale.width // self.scale.heads
        shape = (-1, self.scale.sequence, heads, size)
        query, key, value = (part.reshape(shape).transpose(1, 2) for part in self.all(self.norm(x)).chunk(3, dim=-1))
        weights = torch.softmax(query @ key.transpose(-1, -2) / math.sqrt(size), dim=-1)
        return x + self.out((weights @ value).transpose(1, 2).reshape(x.shape))


class Transformer(nn.Module):
    """Token indices [rows] to logits [rows, width]: embedding, attention and feedforward layers, head."""

    def __init__(self, scale: Scale, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(scale.width, scale.width)
        self.layers = nn.Sequential(
            *[nn.Sequential(Attention(scale), Feedforward(scale, dropout)) for _ in range(max(scale.layers // 2, 1))]
        )
        self.head = nn.Linear(scale.width, scale.width)

    def forward(self, indices: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(indices)))


class Perceptron(nn.Module):
    """Feedforward layers over an embedding; a layer's weight may be stored transposed, and a table of fp8 be a buffer."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.embed = nn.Embedding(scale.width, scale.width)
        self.layers = nn.Sequential(*[Feedforward(scale) for _ in range(scale.layers)])

    def forward(self, indices: Tensor) -> Tensor:
        return self.layers(self.embed(indices))


class Odd(Perceptron):
    """With weights that are not contiguous, and a buffer of fp8 (at least 1 MiB on a GPU's scale)."""

    table: Tensor

    def __init__(self, scale: Scale) -> None:
        super().__init__(scale)
        self.turned = nn.Parameter(torch.randn(4 * scale.width, scale.width).mul_(0.02).t())
        self.register_buffer("table", torch.randn(4 * scale.width, scale.width).mul_(0.02).to(torch.float8_e4m3fn))

    def forward(self, indices: Tensor) -> Tensor:
        hidden = super().forward(indices)
        return hidden @ self.turned @ self.table.to(hidden.dtype)


class Table(nn.Module):
    """Mostly an embedding, whose update needs more than all the rest of training does. `TABLE_ROWS` for each element of width."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.embed = nn.Embedding(TABLE_ROWS * scale.width, scale.width)
        self.layer = Feedforward(scale)

    def forward(self, indices: Tensor) -> Tensor:
        return self.layer(self.embed(indices))


def table_bytes(scale: Scale) -> int:
    """Of the embedding of `Table`, in 32 bits."""
    return TABLE_ROWS * scale.width * scale.width * 4


def table_states_stay_away(step: int, module: nn.Module) -> None:
    """To be called between steps: the states of the table's embedding are in the lower tiers, as its slices have left them."""
    blocks = [block for runtime in registry.REGISTRY.runs() for block in runtime._pager.blocks]
    found = [block for block in blocks if block.name.startswith("optimizer/embed.weight.")]
    assert len(found) == 2 and all(block.state is State.OFFLOADED for block in found), found


def one_adam(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(module.parameters(), lr=1e-3)]


def one_adam_over_masters(module: nn.Module) -> list[torch.optim.Optimizer]:
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)]
    teraio.manage_optimizer(optimizers[0], master_weights=True)
    return optimizers


def one_sgd(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)]


def two_optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(module.parameters())
    half = len(parameters) // 2
    return [torch.optim.SGD(parameters[:half], lr=0.05, momentum=0.9), torch.optim.AdamW(parameters[half:], lr=1e-3, fused=True)]


_OPTIONS = {"profile_iterations": 1, "host_updates": False}
"""Updates on the host round differently, and all runs here are compared bit for bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and how it is trained. clip: of the gradients' norm; evaluate: a pass without gradients after each step."""

    name: str
    model: Callable[[Scale], nn.Module]
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] = one_sgd
    dtype: torch.dtype = torch.float32
    codegen: str = "eager"
    accumulate: int = 1
    clip: bool = False
    evaluate: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(slots=True, kw_only=True)
class Run:
    """values: all losses, then all parameters, buffers and optimizer states, in main memory. Peaks: of the last steps, net of
    what was there before; None where nobody counts. retries: how often the allocator had to give its cache back in them."""

    values: list[Tensor] = field(default_factory=list)
    progress: list[teraio.Status] = field(default_factory=list)
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    retries: int | None = None


def train(
    case: Case,
    options: dict[str, Any],
    *,
    device: torch.device,
    scale: Scale = GPU_SCALE,
    steps: int = STEPS,
    between: Callable[[int, nn.Module], None] = lambda step, module: None,
    backward_done: Callable[[nn.Module], None] = lambda module: None,
) -> Run:
    """Train from a fresh state. between: called after each step, before the next one. backward_done: after each backward."""
    teraio.reset()
    torch._dynamo.reset()
    torch.manual_seed(0)
    counts = device.type == "cuda"
    before = (torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)) if counts else (0, 0)
    module = case.model(scale).to(device)
    _convert(module, case.dtype)
    run = Run()
    model = torch.compile(module, backend="teraio", options={"codegen": case.codegen, **_OPTIONS, **options})
    optimizers = case.optimizers(module)
    batches = torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        if counts and step == steps - _PLANNED_STEPS:
            torch.cuda.reset_peak_memory_stats(device)
            run.retries = -torch.cuda.memory_stats(device)["num_alloc_retries"]
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(case.accumulate):
            loss = _loss(model, _batch(batches, scale, device))
            loss.backward()
            backward_done(module)
            losses.append(loss.detach().clone())
        if case.clip:
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
        if case.evaluate:
            with torch.no_grad():
                losses.append(_loss(model, _batch(batches, scale, device)).clone())
        run.progress += teraio.status()
        if run.progress[-1].phase == "planning":
            assert teraio.wait_for_plan(60)
        between(step, module)
    del loss
    if counts:
        torch.cuda.synchronize(device)
        run.allocated_bytes = torch.cuda.max_memory_allocated(device) - before[0]
        run.reserved_bytes = torch.cuda.max_memory_reserved(device) - before[1]
        run.retries = (run.retries or 0) + torch.cuda.memory_stats(device)["num_alloc_retries"]
    teraio.reset()  # everything comes back
    states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    kept = (*losses, *module.state_dict().values(), *(value for value in states if isinstance(value, Tensor)))
    run.values = [value.cpu() for value in kept]
    return run


def check_equal(found: Run, wanted: Run) -> None:
    """All losses and parameters are the same bits."""
    assert len(found.values) == len(wanted.values)
    unequal = [i for i, (a, b) in enumerate(zip(found.values, wanted.values, strict=True)) if not _same(a, b)]
    assert not unequal, f"{len(unequal)} of {len(found.values)} values differ, the first at {unequal[0]}"


def check_within(found: Run, budget_bytes: int, user_bytes: int = 0) -> None:
    """The run ended by the plan, blocks moved in its last steps, and nobody saw more memory than the budget.

    user_bytes: temporary memory of user code, which the allocator may reserve beside what it keeps for stages.
    """
    last = found.progress[-1]
    assert last.phase == "planned", [status.phase for status in found.progress]
    assert 0 < last.device_peak_bytes <= budget_bytes
    assert sum(last.moved_bytes.values()) > sum(found.progress[-2].moved_bytes.values()), last.moved_bytes
    assert found.allocated_bytes is None or 0 < found.allocated_bytes <= budget_bytes
    assert found.reserved_bytes is None or 0 < found.reserved_bytes <= budget_bytes + user_bytes


def _convert(module: nn.Module, dtype: torch.dtype) -> None:
    """Parameters only: `Module.to` would convert buffers of fp8 too."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def _batch(draw: torch.Generator, scale: Scale, device: torch.device) -> Tensor:
    return torch.randint(0, scale.width, (scale.rows,), generator=draw).to(device)


def _loss(model: Callable[[Tensor], Tensor], indices: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(indices).float(), indices.flip(0))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)
