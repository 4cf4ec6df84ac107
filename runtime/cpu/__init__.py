"""Main memory as the device tier."""

from runtime.cpu.memory import CpuMemory
from runtime.cpu.mover import CpuMover
from runtime.cpu.touched import system_tells

__all__ = [
    "CpuMemory",
    "CpuMover",
    "system_tells",
]
