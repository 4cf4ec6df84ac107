"""Small models, and one training loop for all comparisons of bits, on any device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import teraio
from runtime.paging import State

from ..training import begin, blocks, forget

MIB = 1 << 20
STEPS = 10
"""One or two steps compile, two are profiled, one more gives their times, and two switch to the plan."""
_PLANNED_STEPS = 3
TABLE_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The size of a model. rows: of a batch. width, layers: of the model. heads: of the attention.

    activations: how many a feedforward layer has in a row. More of them take more memory for the same products of matrices.
    """

    rows: int
    width: int
    layers: int
    heads: int = 8
    sequence: int = 256
    activations: int = 1


MADE_UP = torch.cuda.is_available() and torch.cuda.get_device_name() == "made-up GPU"
"""These tests run on `tools/made_up_cuda`: memory, streams and numbers are true, times are not."""
needs_triton = pytest.mark.skipif(MADE_UP, reason="needs Triton's kernels: the made-up GPU cannot run them")

GPU_SCALE = Scale(rows=4096, width=512, layers=16)
"""In fp32: activations of 8 and 32 MiB, weights of 4 MiB, one to two GiB in all."""
if MADE_UP:  # a processor computes: as much memory with a tenth of the products
    GPU_SCALE = Scale(rows=2048, width=256, layers=10, heads=4, sequence=64, activations=24)


class Feedforward(nn.Module):
    """Residual layer of two products, with dropout."""

    def __init__(self, scale: Scale, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(scale.width)
        self.up, self.down = nn.Linear(scale.width, 4 * scale.width), nn.Linear(4 * scale.width, scale.width)
        self.dropout, self.activations = dropout, scale.activations

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        for _ in range(self.activations):
            hidden = torch.tanh(hidden)
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
    """Feedforward layers over an embedding."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.embed = nn.Embedding(scale.width, scale.width)
        self.layers = nn.Sequential(*[Feedforward(scale) for _ in range(scale.layers)])

    def forward(self, indices: Tensor) -> Tensor:
        return self.layers(self.embed(indices))


class Odd(Perceptron):
    """A perceptron with a weight that is not contiguous, and a buffer of fp8 (at least 1 MiB on the GPU's scale)."""

    table: Tensor

    def __init__(self, scale: Scale) -> None:
        super().__init__(scale)
        self.turned = nn.Parameter(torch.randn(4 * scale.width, scale.width).mul_(0.02).t())
        self.register_buffer("table", torch.randn(4 * scale.width, scale.width).mul_(0.02).to(torch.float8_e4m3fn))

    def forward(self, indices: Tensor) -> Tensor:
        hidden = super().forward(indices)
        return hidden @ self.turned @ self.table.to(hidden.dtype)


@torch.compiler.disable
def _uncompiled(wide: Tensor) -> Tensor:
    return wide.unflatten(1, (4, -1)).mean(1)


class ReadBetween(Perceptron):
    """What is read between graphs: an early result, by code that is not compiled; two gradients of `shared`, which autograd adds
    up; and that of `turned`, which has other strides, so that autograd copies it.
    """

    def __init__(self, scale: Scale) -> None:
        super().__init__(scale)
        self.shared = nn.Parameter(torch.randn(4 * scale.width, scale.width).mul_(0.02))
        self.turned = nn.Parameter(torch.randn(4 * scale.width, scale.width).mul_(0.02).t())

    def forward(self, indices: Tensor) -> Tensor:
        hidden = self.embed(indices)
        early = torch.tanh(hidden @ self.shared.t())
        hidden = self.layers(hidden + early @ self.shared) + _uncompiled(early)
        return hidden @ torch.tanh(self.turned.contiguous()) @ self.shared


class Table(nn.Module):
    """Mostly an embedding of `TABLE_ROWS` rows per element of width. Its update needs more memory than all other steps."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.embed = nn.Embedding(TABLE_ROWS * scale.width, scale.width)
        self.layer = Feedforward(scale)

    def forward(self, indices: Tensor) -> Tensor:
        return self.layer(self.embed(indices))


def table_bytes(scale: Scale) -> int:
    """Return the size of the embedding of `Table`, in 32 bits."""
    return TABLE_ROWS * scale.width * scale.width * 4


def table_states_stay_away(step: int, module: nn.Module) -> None:
    """Check between steps that the optimizer states of the embedding are in the lower tiers, where its slices were updated."""
    found = [block for block in blocks() if block.name.startswith("optimizer/embed.weight.")]
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


_OPTIONS = {"profile_iterations": 1, "host_updates": False, "tiles": "off"}
"""Updates on the host round differently, and all runs are compared bit for bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and how it is trained. clip: clip the norm of the gradients. scaled: by a GradScaler.

    evaluate: a pass without gradients after each step.
    """

    name: str
    model: Callable[[Scale], nn.Module]
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] = one_sgd
    dtype: torch.dtype = torch.float32
    codegen: str = "eager"
    accumulate: int = 1
    clip: bool = False
    scaled: bool = False
    evaluate: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(slots=True, kw_only=True)
class Run:
    """The results of a training.

    values: all losses, then all parameters, buffers and optimizer states, in main memory.
    allocated_bytes, reserved_bytes: peaks of the last steps, without the bytes from before the run. None if not counted.
    retries: how often the allocator had to give its cache back in the last steps.
    """

    values: list[Tensor] = field(default_factory=list)
    progress: list[teraio.Status] = field(default_factory=list)
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    retries: int | None = None

    @property
    def peak_bytes(self) -> int:
        """The peak, by teraio's own count where the allocator counts nothing."""
        return self.progress[-1].device_peak_bytes if self.allocated_bytes is None else self.allocated_bytes


def random_batches(case: Case, scale: Scale, steps: int) -> Iterator[list[Tensor]]:
    """For each step the batches to train with, and then one to evaluate, all in main memory."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield [torch.randint(0, scale.width, (scale.rows,), generator=draw) for _ in range(case.accumulate + case.evaluate)]


def train(
    case: Case,
    options: dict[str, Any],
    *,
    device: torch.device,
    scale: Scale = GPU_SCALE,
    steps: int = STEPS,
    make_batches: Callable[[Case, Scale, int], Iterable[list[Tensor]]] = random_batches,
    between: Callable[[int, nn.Module], None] = lambda step, module: None,
    backward_done: Callable[[nn.Module], None] = lambda module: None,
) -> Run:
    """Train from a fresh state. make_batches: as `random_batches`. between: called after each step.

    backward_done: called after each backward pass.
    """
    forget()
    counter = _DeviceMemory(device) if device.type == "cuda" else None

    def make_model() -> nn.Module:
        module = case.model(scale).to(device)
        _convert(module, case.dtype)
        return module

    training = begin(make_model, case.optimizers, {"codegen": case.codegen, **_OPTIONS, **options})
    module, losses, scaler = training.module, [], torch.amp.GradScaler(device.type, enabled=case.scaled)

    def take(batches: list[Tensor], step: int) -> None:
        if counter is not None and step == steps - _PLANNED_STEPS:
            counter.begin()
        for optimizer in training.optimizers:
            optimizer.zero_grad()
        for indices in batches[: case.accumulate]:
            loss = _loss(training.model, indices.to(device))
            scaler.scale(loss).backward()
            backward_done(module)
            losses.append(loss.detach().clone())
        if case.clip:
            for optimizer in training.optimizers:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        for optimizer in training.optimizers:
            scaler.step(optimizer)
        scaler.update()
        if case.evaluate:
            with torch.no_grad():
                losses.append(_loss(training.model, batches[-1].to(device)).clone())
        between(step, module)

    training.run(make_batches(case, scale, steps), take, planned=True)
    run = Run(progress=[status for statuses in training.progress for status in statuses])
    if counter is not None:
        counter.end(run)
    teraio.reset()  # all blocks come back; `Training.finish` would read them before, where kernels may not reach them
    states = [value for optimizer in training.optimizers for state in optimizer.state.values() for value in state.values()]
    kept = (*losses, *module.state_dict().values(), *(value for value in states if isinstance(value, Tensor)))
    run.values = [value.cpu() for value in kept]
    return run


@functools.cache
def unlimited(case: Case) -> Run:
    """Train the case on the GPU without a budget, once in a process. The run also gives the peak of its memory."""
    run = train(case, {}, device=torch.device("cuda"))
    assert run.progress[-1].phase == "fits" and not any(run.progress[-1].moved_bytes.values())
    return run


class _DeviceMemory:
    """What PyTorch's allocator counts on a GPU, without the bytes from before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.empty_cache()  # what an earlier training has left in the cache is no memory from before this one
        self._before = (torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))
        self._retries = 0

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._retries = self._count_retries()

    def end(self, run: Run) -> None:
        """Note in `run` the peaks and the retries since `begin`."""
        torch.cuda.synchronize(self._device)
        run.allocated_bytes = torch.cuda.max_memory_allocated(self._device) - self._before[0]
        run.reserved_bytes = torch.cuda.max_memory_reserved(self._device) - self._before[1]
        run.retries = self._count_retries() - self._retries

    def _count_retries(self) -> int:
        retries: int = torch.cuda.memory_stats(self._device)["num_alloc_retries"]
        return retries


def check_equal(found: Run, wanted: Run) -> None:
    """Check that all losses and parameters have the same bits."""
    assert len(found.values) == len(wanted.values)
    unequal = [i for i, (a, b) in enumerate(zip(found.values, wanted.values, strict=True)) if not _same(a, b)]
    assert not unequal, f"{len(unequal)} of {len(found.values)} values differ, the first at {unequal[0]}"


def check_within(found: Run, budget_bytes: int, user_bytes: int = 0) -> None:
    """Check that the run followed a plan, that blocks moved meanwhile, and that it stayed within the budget.

    user_bytes: temporary memory of user code, which the allocator may reserve beyond the budget.
    """
    planned = [status for status in found.progress if status.phase == "planned"]
    # The last ones may profile again.
    assert len(planned) >= 2, [status.phase for status in found.progress]
    assert 0 < found.progress[-1].device_peak_bytes <= budget_bytes
    assert sum(planned[-1].moved_bytes.values()) > sum(planned[-2].moved_bytes.values()), planned[-1].moved_bytes
    assert found.allocated_bytes is None or 0 < found.allocated_bytes <= budget_bytes
    most = budget_bytes + user_bytes
    assert found.reserved_bytes is None or 0 < found.reserved_bytes <= most, (found.reserved_bytes, budget_bytes, user_bytes)


def _convert(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert parameters only: `Module.to` would convert buffers of fp8 too."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def _loss(model: Callable[[Tensor], Tensor], indices: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(indices).float(), indices.flip(0))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)
