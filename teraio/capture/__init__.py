"""Traces of training steps that never ran: captured under fake tensors for any machine."""

from teraio.capture.capture import capture
from teraio.capture.hardware import MachineDescription, known_machines

__all__ = [
    "MachineDescription",
    "capture",
    "known_machines",
]
