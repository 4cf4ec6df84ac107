"""The machine that a training run uses: its device, its lower tiers, the links between them, and its share of all of it."""

from teraio.machine.division import divided_alone, divided_among
from teraio.machine.machine import Machine
from teraio.machine.reserve import Allocator, Reserve
from teraio.machine.tiers import MachineTiers, MeasuredPaths

__all__ = [
    "Allocator",
    "Machine",
    "MachineTiers",
    "MeasuredPaths",
    "Reserve",
    "divided_alone",
    "divided_among",
]
