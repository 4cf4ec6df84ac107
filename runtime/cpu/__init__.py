"""Main memory as the device tier."""

from runtime.cpu.memory import CpuMemory
from runtime.cpu.mover import CpuMover

__all__ = [
    "CpuMemory",
    "CpuMover",
]
