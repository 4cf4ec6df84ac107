"""Managed optimizer steps over a mover whose copies end when a test says so."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from planner import Hardware, Link
from runtime.device.device import CpuDevice, Device
from runtime.paging.block import Block
from runtime.paging.mover import Mover
from runtime.paging.pager import Pager
from teraio.optimizer.steps import OptimizerSteps
from teraio.optimizer.subgroup_sizes import SubgroupSizes
from teraio.profiling.iteration import Iteration
from teraio.profiling.profiler import Profile, build_profile
from teraio.profiling.recorder import Timeline

from ...runtime.memory_mover import MemoryMover, Stepping

SIZE = 4 << 10
"""Bytes of a parameter. They are enough to move, and for a subgroup, which needs six times as much with AdamW."""


class AsynchronousDevice(CpuDevice):
    """Says of itself that it works on its own, as a GPU does."""

    asynchronous = True


class Training:
    """Parameters whose optimizer steps are managed; gradients come from the test, as from user code."""

    def __init__(
        self,
        count: int = 6,
        *,
        budget_bytes: int | None,
        gpu: bool = False,
        automatic: bool = True,
        device: Device | None = None,
        mover: Mover | None = None,
        parameters: list[nn.Parameter] | None = None,
        sizes: SubgroupSizes | None = None,
    ) -> None:
        self.mover = MemoryMover()
        self.pager = Pager(
            mover=mover or self.mover,
            budget_bytes=budget_bytes,
            device=device or (AsynchronousDevice() if gpu else CpuDevice()),
        )
        self.pager._changed = Stepping(self.finish_one)
        self.timeline = Timeline(self.pager)
        self.active = True
        self.iterations: list[Iteration] = []
        self.steps = OptimizerSteps(
            self.pager,
            self.timeline,
            active=lambda: self.active,
            automatic=automatic,
            step_done=lambda _: self.iterations.append(self.timeline.iteration_ends()),
            sizes=sizes or SubgroupSizes(min_bytes=SIZE),
            min_moved_bytes=SIZE,
        )
        self.parameters = make_parameters(count) if parameters is None else parameters
        for number, parameter in enumerate(self.parameters):
            self.pager.block_of(parameter, name=f"layer.{number}", kind="parameter", user_visible=True)

    def finish_one(self) -> bool:
        if self.mover.flying:
            self.mover.finish()
            return True
        return False

    def train(self, optimizer: Optimizer, steps: int, first: int = 0) -> None:
        for step in range(first, first + steps):
            set_gradients(self.parameters, step)
            optimizer.step()
            optimizer.zero_grad()
            for iteration in self.iterations:
                iteration.read_times()

    def states(self) -> dict[str, Block]:
        return {block.name: block for block in self.pager.blocks if block.kind == "optimizer_state"}

    def profile(self) -> Profile:
        links = tuple(
            Link(from_tier=a, to_tier=b, bytes_per_second=1e9)  # type: ignore[arg-type]
            for a, b in (("device", "storage"), ("storage", "device"))
        )
        return build_profile(
            self.iterations[-2:],
            name="x",
            created_by="tests",
            survivors=set(),
            fixed_bytes=self.pager.unmoved_bytes,
            hardware=Hardware(name="made up", device_memory_bytes=1 << 30, links=links),
        )


Start = Callable[..., Training]


def make_parameters(count: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(32, 32, generator=generator)) for _ in range(count)]


def set_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(32, 32, generator=generator)


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of all tensors in the optimizer's state. A storage that several tensors share counts once."""
    storages = [value.untyped_storage() for value in tree_leaves(dict(optimizer.state)) if isinstance(value, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def everything(optimizer: Optimizer) -> list[Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [value for p in parameters for value in optimizer.state.get(p, {}).values()]
    return [value.detach().clone() for value in (*parameters, *states) if isinstance(value, Tensor)]


def plain(steps: int, count: int = 6, make: Callable[[list[nn.Parameter]], Optimizer] = torch.optim.AdamW) -> list[Tensor]:
    parameters = make_parameters(count)
    optimizer = make(parameters)
    for step in range(steps):
        set_gradients(parameters, step)
        optimizer.step()
    return everything(optimizer)


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))
