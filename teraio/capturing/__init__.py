"""Traces of training steps that never ran: captured under fake tensors for any machine."""

from teraio.capturing.capture import capture
from teraio.capturing.hardware import MachineDescription, known_machines

__all__ = [
    "MachineDescription",
    "capture",
    "known_machines",
]
