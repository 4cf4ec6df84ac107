"""Main memory as the device."""

from runtime.cpu.memory import CpuMemory
from runtime.cpu.mover import CpuMover

__all__ = [
    "CpuMemory",
    "CpuMover",
]
