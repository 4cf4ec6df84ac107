"""The machine that a training run uses: its device, its lower tiers, the links between them."""

from teraio.machine.machine import Machine
from teraio.machine.tiers import MachineTiers, MeasuredPaths

__all__ = [
    "Machine",
    "MachineTiers",
    "MeasuredPaths",
]
