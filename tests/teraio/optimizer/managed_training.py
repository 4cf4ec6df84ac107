"""Managed optimizer steps of parameters whose gradients come from the test, as from user code."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from planner.errors import StorageError
from runtime.cpu import CheckedCpuMover, CpuMemory, CpuMover
from runtime.device import CpuDevice
from runtime.paging import Block, Mover, Pager, State, Tier, Tiers
from runtime.storage import HostStore, PosixStore, Store
from runtime.transfer import Engine
from teraio.distributed import LibraryCalls
from teraio.following import IterationObserver
from teraio.optimizer import OptimizerSteps, SubgroupSizes
from teraio.profiling import Iteration, Profile

from ...runtime.memory_mover import MemoryMover, Stepping
from ..virtual import IN, OUT, hardware, profile_of
from .plain_training import KIB, LARGE, SIZE, large_parameters, set_gradients, square_parameters

LARGE_BUDGET = LARGE * 5 // 2
"""For `large_parameters`: parameter, gradient, and half as much: far below parameter, gradient and two states."""


class ManagedTraining:
    """Parameters whose optimizer steps are managed by a pager. Each step of an optimizer is an iteration.

    name: of a parameter's block, by its number.
    """

    def __init__(
        self, pager: Pager, parameters: list[nn.Parameter], *, name: Callable[[int], str] = "p{}".format, **settings: Any
    ) -> None:
        self.pager = pager
        self.parameters = parameters
        self.observer = IterationObserver(pager)
        self.active = True
        self.iterations: list[Iteration] = []
        self._finished: list[weakref.ref[Optimizer]] = []
        calls = LibraryCalls(pager, self.observer, active=lambda: self.active, explained=lambda error: error)
        self.steps = OptimizerSteps(calls, step_done=self._step_done, **settings)
        for number, parameter in enumerate(parameters):
            pager.block_of(parameter, name=name(number), kind="parameter", user_visible=True)

    def _step_done(self, optimizer: Optimizer) -> None:
        self._finished.append(weakref.ref(optimizer))
        self.iterations.append(self.observer.iteration_ends())

    @property
    def finished(self) -> list[Optimizer | None]:
        """The optimizer of each iteration; None if it is gone."""
        return [each() for each in self._finished]

    def train(self, optimizer: Optimizer, steps: int, first: int = 0) -> None:
        for step in range(first, first + steps):
            set_gradients(self.parameters, step)
            optimizer.step()
            optimizer.zero_grad()
            for iteration in self.iterations:
                iteration.read_times()

    def stage_names(self) -> list[str]:
        """Of the optimizer stages so far."""
        return [s.name for iteration in self.iterations for s in iteration.stages if s.phase == "optimizer"]

    def states(self) -> dict[str, Block]:
        return {block.name: block for block in self.pager.blocks if block.kind == "optimizer_state"}

    def profile(self) -> Profile:
        """Of the last two iterations."""
        for iteration in self.iterations:
            iteration.read_times()
        machine = hardware({OUT: 1e9, IN: 1e9})
        return profile_of(self.iterations[-2:], fixed_bytes=self.pager.account.unmoved_bytes, hardware=machine)


class Training(ManagedTraining):
    """Over a mover whose copies end when a test says so. Parameters of 4 KiB move, and are subgroups by themselves."""

    def __init__(
        self,
        count: int = 6,
        *,
        budget_bytes: int | None,
        parameters: list[nn.Parameter] | None = None,
        sizes: SubgroupSizes | None = None,
    ) -> None:
        self.mover = MemoryMover()
        condition = Stepping(self.finish_one)
        pager = Pager(mover=self.mover, budget_bytes=budget_bytes, device=CpuDevice(), condition=condition)
        super().__init__(
            pager,
            square_parameters(count) if parameters is None else parameters,
            name="layer.{}".format,
            sizes=sizes or SubgroupSizes(min_bytes=SIZE),
        )

    def finish_one(self) -> bool:
        if self.mover.flying:
            self.mover.finish()
            return True
        return False


class TieredTraining(ManagedTraining):
    """Over real memory and real tiers: "storage" of one directory or several, and a "host" tier of `host_bytes`."""

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        budget_bytes: int | None = LARGE_BUDGET,
        host_bytes: int = 0,
        debug: bool = False,
        checksums: bool = False,
        parameters: list[nn.Parameter] | None = None,
    ) -> None:
        self._last = ExitStack()
        self.memory = CpuMemory()
        self._last.callback(self.memory.stand_back)
        parameters = large_parameters() if parameters is None else parameters
        for parameter in parameters:
            self.memory.adopt(parameter.untyped_storage())
        tiers = []
        if host_bytes:
            tiers.append(self._tier(HostStore(host_bytes), checksums))
        if folders:
            tiers.append(self._tier(PosixStore(folders, budget_bytes=None), checksums))
        self.tiers = {tier.name: tier for tier in tiers}
        checks = debug or checksums
        plain = CpuMover(self.memory, Tiers(tiers, mapped=not checks), poison=debug)
        self.mover: Mover = CheckedCpuMover(plain, debug=debug) if checks else plain
        self._last.callback(self.mover.tiers.close)
        super().__init__(Pager(mover=self.mover, budget_bytes=budget_bytes, device=CpuDevice()), parameters)
        self._last.callback(self.steps.close)

    def _tier(self, store: Store, checksums: bool) -> Tier:
        self._last.callback(store.close)
        engine = Engine(store, threads=2, chunk_bytes=64 * KIB, checksums=checksums)
        self._last.callback(engine.close)
        return Tier(store=store, engine=engine)

    def close(self) -> None:
        """Bring all back and close the tiers. Failures of copies that were told before do not count again."""
        try:
            self.pager.closing.bring_back()
        except StorageError as error:
            raise AssertionError(f"blocks cannot come back: {error}") from error
        finally:
            self._last.close()


Start = Callable[..., Training]
StartTiered = Callable[..., TieredTraining]


def check_sliced(training: TieredTraining, states: int) -> None:
    """So many states have never been on the device with the others, and the budget was kept."""
    found = training.states()
    assert len(found) == states and all(block.state is State.OFFLOADED for block in found.values())
    assert training.pager.account.peak_bytes <= (training.pager.account.budget_bytes or 0)
