"""The machine of a capture: what a description says, in the place of what is measured."""

from __future__ import annotations

from contextlib import ExitStack

import torch

import planner
from teraio.capturing.hardware import MachineDescription
from teraio.capturing.modelled_device import ModelledDevice, ResidentMover
from teraio.machine import Machine, MachineTiers
from teraio.optimizer import HostRates, OptimizerFacts
from teraio.options import Options


class ModelledMachine(Machine):
    """The `Machine` of a description. It has lower tiers, but nothing moves to them: there is no budget."""

    def __init__(self, options: Options, device: torch.device, modelled: ModelledDevice, description: MachineDescription) -> None:
        self._description = description
        tiers = MachineTiers(
            name=description.hardware.name,
            device=modelled,
            device_memory_bytes=description.hardware.device_memory_bytes,
            memory=modelled,
            mover=ResidentMover(),
            undo=ExitStack(),
        )
        super().__init__(options, device, open_tiers=lambda *_: tiers)

    def hardware(self) -> planner.Hardware:
        return self._description.hardware


class DescribedHostRates(HostRates):
    """elements_per_second: how fast updates run on the host's processor; None if they cannot run there."""

    def __init__(self, elements_per_second: float | None) -> None:
        self._elements_per_second = elements_per_second

    def seconds(self, facts: OptimizerFacts, dtype: torch.dtype, elements: int) -> float | None:
        if self._elements_per_second is None or facts.off_host_because is not None:
            return None
        return elements / self._elements_per_second
