"""The machine that a training run has: its device, its lower tiers, the links between them."""

from teraio.machine.machine import Machine

__all__ = [
    "Machine",
]
