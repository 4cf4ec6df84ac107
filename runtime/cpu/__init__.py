"""Main memory as the device tier."""

from runtime.cpu.checked import CheckedCpuMover
from runtime.cpu.memory import CpuMemory, system_tells
from runtime.cpu.mover import CpuMover

__all__ = [
    "CheckedCpuMover",
    "CpuMemory",
    "CpuMover",
    "system_tells",
]
