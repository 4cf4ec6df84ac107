"""Main memory as the device tier."""

from runtime.cpu.memory import CpuMemory, system_tells, unchanged_since_mapped
from runtime.cpu.mover import CheckedCpuMover, CpuMover
