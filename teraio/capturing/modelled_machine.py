"""The machine of a capture: what a description says, in the place of what is measured."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch

import planner
from teraio.capturing.modelled_device import ModelledDevice, ResidentMover
from teraio.machine import Machine, ResolvedBudgets
from teraio.optimizer import HostRates, OptimizerFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledMachine(Machine):
    """The `Machine` of a description. It has lower tiers, but nothing moves to them: there is no budget."""

    described: planner.Hardware

    @classmethod
    def of(cls, modelled: ModelledDevice, described: planner.Hardware) -> ModelledMachine:
        return cls(
            name=described.name,
            device=modelled,
            device_memory_bytes=described.device_memory_bytes,
            budgets=ResolvedBudgets(),
            memory=modelled,
            mover=ResidentMover(),
            undo=ExitStack(),
            described=described,
        )

    def hardware(self) -> planner.Hardware:
        return self.described


class DescribedHostRates(HostRates):
    """elements_per_second: how fast updates run on the host's processor; None if they cannot run there."""

    def __init__(self, elements_per_second: float | None) -> None:
        self._elements_per_second = elements_per_second

    def seconds(self, facts: OptimizerFacts, dtype: torch.dtype, elements: int) -> float | None:
        if self._elements_per_second is None or facts.off_host_because is not None:
            return None
        return elements / self._elements_per_second
