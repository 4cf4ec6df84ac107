"""Managed optimizer steps over real memory and real tiers, of a parameter whose update does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from planner import Hardware, Link
from planner.errors import StorageError
from runtime.cpu.memory import CpuMemory
from runtime.cpu.mover import CpuMover
from runtime.device.device import CpuDevice
from runtime.paging.block import Block, State
from runtime.paging.debug import Debug
from runtime.paging.pager import Pager
from runtime.paging.tiers import Tier, Tiers
from runtime.storage.host import HostStore
from runtime.storage.posix import PosixStore
from runtime.storage.store import Store
from runtime.transfer.engine import Engine
from teraio.optimizer.steps import OptimizerSteps
from teraio.profiling.iteration import Iteration
from teraio.profiling.recorder import IterationRecorder

from .every_optimizer import OPTIMIZERS, Make

MIB = 1 << 20
SHAPE = (1553, 257)
"""Of the large parameter: about 1.5 MiB in 32 bits, and no whole number of slices, pages or vectors."""
LARGE = 1553 * 257 * 4
BUDGET = LARGE * 5 // 2
"""Parameter, gradient, and half as much: far below parameter, gradient and two states."""
HARDWARE = Hardware(
    name="made up",
    device_memory_bytes=1 << 30,
    links=(
        Link(from_tier="device", to_tier="storage", bytes_per_second=1e9),
        Link(from_tier="storage", to_tier="device", bytes_per_second=1e9),
    ),
)


KINDS = {name: make for name, make in OPTIMIZERS.items() if name != "SGD"}
"""Those with states."""


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def make_parameters(dtype: torch.dtype = torch.float32, shape: Sequence[int] = SHAPE) -> list[nn.Parameter]:
    """A large one between small ones."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in ((32, 32), tuple(shape), (7,), (64, 16))]


def set_gradients(parameters: Sequence[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))


def train(optimizer: Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        set_gradients([p for group in optimizer.param_groups for p in group["params"]], step)
        optimizer.step()
        optimizer.zero_grad()


def everything(optimizer: Optimizer) -> dict[str, Tensor]:
    """Copies of parameters and states, in order, with names."""
    found: dict[str, Tensor] = {}
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        found[f"{number}"] = parameter.detach().clone()
        for name, value in optimizer.state.get(parameter, {}).items():
            found[f"{number}.{name}"] = torch.as_tensor(value).clone()
    return found


def plain(make: Make, steps: int, parameters: list[nn.Parameter] | None = None) -> dict[str, Tensor]:
    """What plain PyTorch makes of it."""
    optimizer = make(make_parameters() if parameters is None else parameters)
    train(optimizer, steps)
    return everything(optimizer)


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not equal bit for bit; of all if they, or their order, are not the same."""
    if list(found) != list(expected):
        return [*found, "in place of", *expected]
    return [name for name, value in found.items() if not torch.equal(value, expected[name])]


class Rig:
    """Parameters under a budget, over a "storage" of one directory or several, and a "host" tier of `host_bytes`."""

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        budget_bytes: int | None = BUDGET,
        host_bytes: int = 0,
        debug: bool = False,
        checksums: bool = False,
        parameters: list[nn.Parameter] | None = None,
    ) -> None:
        self._last = ExitStack()
        self.memory = CpuMemory()
        self._last.callback(self.memory.stand_back)
        self.parameters = make_parameters() if parameters is None else parameters
        for parameter in self.parameters:
            self.memory.adopt(parameter.untyped_storage())
        tiers = []
        if host_bytes:
            tiers.append(self._tier("host", HostStore(host_bytes), checksums))
        if folders:
            tiers.append(self._tier("storage", PosixStore(folders, budget_bytes=None), checksums))
        self.tiers = {tier.name: tier for tier in tiers}
        self.mover = CpuMover(self.memory, Tiers(tiers), debug=Debug() if debug else None)
        self._last.callback(self.mover.close)
        self.pager = Pager(mover=self.mover, budget_bytes=budget_bytes, device=CpuDevice())
        self.timeline = IterationRecorder(self.pager)
        self.iterations: list[Iteration] = []
        self.steps = OptimizerSteps(
            self.pager,
            self.timeline,
            active=lambda: True,
            step_done=lambda _: self.iterations.append(self.timeline.iteration_ends()),
        )
        self._last.callback(self.steps.close)
        for number, parameter in enumerate(self.parameters):
            self.pager.block_of(parameter, name=f"p{number}", kind="parameter", user_visible=True)

    def _tier(self, name: str, store: Store, checksums: bool) -> Tier:
        self._last.callback(store.close)
        engine = Engine(store, tier=name, threads=2, chunk_bytes=64 << 10, checksums=checksums)  # type: ignore[arg-type]
        self._last.callback(engine.close)
        return Tier(name=name, store=store, engine=engine)  # type: ignore[arg-type]

    def states(self) -> dict[str, Block]:
        """Blocks of the large parameter's states, by name of the state."""
        blocks = [block for block in self.pager.blocks if block.kind == "optimizer_state"]
        return {block.name.removeprefix("optimizer/p1."): block for block in blocks}

    def close(self) -> None:
        """Bring all back and close the tiers. Failures of copies that were told before do not count again."""
        try:
            self.pager.bring_back_all()
        except StorageError as error:
            raise AssertionError(f"blocks cannot come back: {error}") from error
        finally:
            self._last.close()


SlicedRig = Callable[..., Rig]


def check_sliced(rig: Rig, states: int) -> None:
    """So many states have never been on the device with the others, and the budget was kept."""
    found = rig.states()
    assert len(found) == states and all(block.state is State.OFFLOADED for block in found.values())
    assert rig.pager.peak_bytes <= (rig.pager.budget_bytes or 0)
