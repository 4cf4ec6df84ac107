"""Main memory as the device tier."""

from runtime.cpu.memory import CpuMemory, system_tells
from runtime.cpu.mover import CpuMover

__all__ = [
    "CpuMemory",
    "CpuMover",
    "system_tells",
]
