"""Trainings that each rank runs: with teraio under a budget, and without teraio. What a rank finds goes back to the test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import teraio
from runtime.paging import holder_of

from ...training import MIB, PLAN_SECONDS, blocks, compiled, forget, known_blocks, require

ROWS, WIDTH, WIDE = 8, 512, 1024
STEPS = 8
"""Enough to compile (1), profile (1), hear of other ranks (3), and follow their plan (2)."""

Options = Mapping[str, Any] | None
"""Of the backend; None trains without teraio."""


class Block(nn.Module):
    """[rows, width] to the same, through two weights of 2 MiB each: the half of one is still large enough to move."""

    def __init__(self, wide: int = WIDE) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, wide), nn.Linear(wide, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Two blocks, one after the other. unused: with a weight that no forward pass uses. wide: of what is inside of the blocks."""

    def __init__(self, *, unused: bool = False, wide: int = WIDE) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(wide) for _ in range(2))
        if unused:
            self.unused = nn.Linear(WIDTH, WIDE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@dataclass(slots=True, kw_only=True)
class Found:
    """What one rank has found. values: losses, norms and full parameters, by name.

    phase, waiting_for, peak, moved: of teraio's status at the end. movable: by kind, whether the block of each large parameter or
    gradient can move, after the last step. states: names of the optimizer states that can move.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    phase: str = ""
    waiting_for: str | None = None
    peak: int = 0
    moved: dict[str, int] = field(default_factory=dict)
    movable: dict[str, list[bool]] = field(default_factory=dict)
    states: set[str] = field(default_factory=set)


Made = tuple[Any, nn.Module, Optimizer]
"""What is called, what is trained, and its optimizer."""


def one_pass(model: Any, rows: Tensor) -> list[Tensor]:
    """Forward and backward. Returns the losses."""
    loss = model(rows).square().mean()
    loss.backward()
    return [loss]


def train(
    make: Callable[[Callable[[Any], Any]], Made],
    options: Options,
    *,
    steps: int = STEPS,
    passes: int = 1,
    clip: bool = False,
    rows: Sequence[int] = (ROWS,),
    same_rows: bool = False,
    no_sync: Callable[[Any], AbstractContextManager[Any]] | None = None,
    run_pass: Callable[[Any, Tensor], list[Tensor]] = one_pass,
    epochs: tuple[tuple[int, ...], ...] = (),
    born: bool = False,
    seed: int = 0,
    before: Callable[[int, nn.Module, Optimizer, Found], None] = lambda *given: None,
    **given: Any,
) -> Found:
    """Train what `make` makes from a function that compiles, or does not if `options` is None.

    rows: of the batches by turns, which each rank begins at another place. no_sync: around all passes of a step but the last.
    epochs: steps by rank, in each of which ranks that have ended join those that go on; then gradients stay until the next step.
    born: under the budget, if there is one. seed: of the weights. before: called before each step. given: options of the backend.
    """
    forget()
    torch.manual_seed(seed)
    settings = {"codegen": "eager", "profile_iterations": 1, **given, **(options or {})}

    def prepare(what: Any) -> Any:
        dynamic = {"dynamic": True} if len(rows) > 1 else {}
        return compiled(what, settings, **dynamic) if options is not None else what

    with teraio.under_budget(**settings) if born and options else nullcontext():
        model, module, optimizer = make(prepare)
    random = torch.Generator().manual_seed(1 if same_rows else 1 + dist.get_rank())
    found = Found()
    joining = [each for each in (getattr(model, "_orig_mod", model), optimizer) if isinstance(each, Joinable)]
    for epoch, count in enumerate([each[dist.get_rank()] for each in epochs] or [steps]):
        with Join(joining) if epochs else nullcontext():
            for step in range(count):
                before(step, module, optimizer, found)
                optimizer.zero_grad() if epochs else None
                for number in range(passes):
                    count_rows = rows[(step * passes + number + dist.get_rank()) % len(rows)]
                    with no_sync(model) if no_sync is not None and number < passes - 1 else nullcontext():
                        losses = run_pass(model, torch.randn(count_rows, WIDTH, generator=random))
                    found.values |= {f"loss {epoch}.{step}.{number}.{n}": e.detach().clone() for n, e in enumerate(losses)}
                if clip:
                    norm = nn.utils.clip_grad_norm_(module.parameters(), 0.05)
                    found.values[f"norm {step}"] = full(norm).clone()
                optimizer.step()
                if step == count - 1:
                    _note_blocks(found, module, optimizer)
                if not epochs:
                    optimizer.zero_grad()
                if options is not None:
                    require(teraio.wait_for_plan(PLAN_SECONDS), "no plan")
        if epochs:
            found.values |= {f"gradient {epoch} {n}": p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    if options is not None:
        (status,) = teraio.status()
        found.phase, found.waiting_for, found.peak = status.phase, status.waiting_for, status.device_peak_bytes
        found.moved = dict(status.moved_bytes)
    found.values |= full_parameters(module)
    teraio.reset()
    return found


def full(value: Tensor) -> Tensor:
    """The whole tensor, of all ranks."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def full_parameters(module: nn.Module) -> dict[str, Tensor]:
    return {f"parameter {name}": full(value).detach().clone() for name, value in module.named_parameters()}


def _note_blocks(found: Found, module: nn.Module, optimizer: Optimizer) -> None:
    parameters = list(module.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    for kind, tensors in (("parameter", parameters), ("gradient", gradients)):
        large = [each for each in tensors if holder_of(each).nbytes >= MIB]
        found.movable[kind] = [block.span is not None for block in known_blocks(large)]
    found.states = {block.name for block in blocks() if block.kind == "optimizer_state" and block.span is not None}


def differences(found: Found, expected: Found) -> dict[str, float]:
    """The largest difference of each value, as a share of the largest expected one; equal values are left out."""
    require(found.values.keys() == expected.values.keys(), f"{found.values.keys() ^ expected.values.keys()}")
    pairs = {name: (found.values[name], value) for name, value in expected.values.items()}
    return {
        name: ((one - other).abs().max() / other.abs().max().clamp_min(1e-8)).item()
        for name, (one, other) in pairs.items()
        if not torch.equal(one, other)
    }


# -- PyTorch's parallel libraries


def momentum(module: nn.Module) -> Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def adamw(module: nn.Module) -> Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-3)


def zero_adamw(module: nn.Module) -> Optimizer:
    return ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-3, eps=1e-3)


def zero_momentum(module: nn.Module) -> Optimizer:
    return ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)


def ddp(
    options: Options,
    *,
    around: bool = True,
    optimize_ddp: Any = True,
    unused: bool = False,
    settings: dict[str, Any] | None = None,
    optimizer: Callable[[nn.Module], Optimizer] = momentum,
    **training: Any,
) -> Found:
    """DistributedDataParallel. around: it is what is compiled, not what is inside."""
    hooks: list[Any] = []

    def make(prepare: Any) -> Made:
        module = Stack(unused=unused)
        made = optimizer(module)
        model = DistributedDataParallel(module if around else prepare(module), bucket_cap_mb=5, **(settings or {}))
        hooks.extend(model._accum_grad_hooks)
        return prepare(model) if around else model, module, made

    with torch._dynamo.config.patch(optimize_ddp=optimize_ddp):
        found = train(make, options, **training)
    for hook in hooks:  # of "python_reducer": they would keep the module, and its buckets, for ever
        hook.remove()
    return found


def no_sync(model: Any) -> Any:
    return getattr(model, "_orig_mod", model).no_sync()


def fsdp(
    options: Options, *, whole: bool = False, wide: int = WIDE, settings: dict[str, Any] | None = None, **training: Any
) -> Found:
    """`fully_shard` for each block and the root. whole: the model is compiled, not each block."""

    def make(prepare: Any) -> Made:
        module = sharded(None if whole else options, wide=wide, **(settings or {}))
        return prepare(module) if whole else module, module, adamw(module)

    return train(make, options, **training)


def sharded(options: Options, *, wide: int = WIDE, **settings: Any) -> nn.Module:
    """Blocks that are sharded one by one, and compiled one by one with these options."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = Stack(wide=wide)
    for block in module.blocks:
        if options is not None:
            block.compile(backend="teraio", options={"codegen": "eager", "profile_iterations": 1, **options})
        fully_shard(block, mesh=mesh, **settings)
    return fully_shard(module, mesh=mesh, **settings)


HALVES = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


def tensor_parallel(options: Options, *, sequence: bool, **training: Any) -> Found:
    """Each block's first weight is cut by columns and its second by rows. sequence: so is the norm, by rows of the input."""

    def make(prepare: Any) -> Made:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        module = Stack()
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            plan = {
                "norm": SequenceParallel(sequence_dim=0),
                "up": ColwiseParallel(input_layouts=Shard(0)),
                "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
            }
        for block in module.blocks:
            parallelize_module(block, mesh, plan)
        model = prepare(module)
        return lambda x: full(model(distribute_tensor(x, mesh, [Shard(0)]) if sequence else x)), module, momentum(module)

    return train(make, options, same_rows=True, **training)


class Gathering(nn.Module):
    """A block whose weights are gathered in the graph from their shards, as SimpleFSDP does by parametrizations."""

    def __init__(self, inner: nn.Module, mesh: Any) -> None:
        super().__init__()
        self.inner = inner
        for module in list(inner.modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                shard = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
                module.register_parameter(name, shard)
                nn.utils.parametrize.register_parametrization(module, name, _Gathered(), unsafe=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class _Gathered(nn.Module):
    def forward(self, shard: DTensor) -> Tensor:
        return shard.redistribute(placements=[Replicate()]).to_local()


def gathered_in_the_graph(options: Options) -> Found:
    def make(prepare: Any) -> Made:
        module = Gathering(Stack(), init_device_mesh("cpu", (dist.get_world_size(),)))
        return prepare(module), module, momentum(module)

    return train(make, options, same_rows=True)


def pipeline(options: Options) -> Found:
    """Each rank compiles a stage of its own, and needs what the rank before has computed."""
    parts = 2

    def make(prepare: Any) -> Made:
        module = Stack()
        stage = PipelineStage(prepare(module), dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
        return Schedule1F1B(stage, parts, loss_fn=lambda x, wanted: (x - wanted).square().mean()), module, momentum(module)

    def run_pass(schedule: Any, rows: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        schedule.step(rows) if dist.get_rank() == 0 else schedule.step(target=torch.zeros_like(rows), losses=losses)
        return losses

    return train(make, options, steps=6, rows=(parts * ROWS,), same_rows=True, run_pass=run_pass, local_ranks=1)


joined = partial(ddp, around=False, epochs=((9, 6), (3, 2)))
"""Uneven inputs (`Join`): a rank whose batches have ended shadows the collectives of the others, and all go on afterwards."""
