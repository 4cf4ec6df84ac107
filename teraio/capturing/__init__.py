"""Traces of training steps that never ran: captured under fake tensors for any machine."""

import runtime  # first: it looks for the names of PyTorch that this room imports
from teraio.capturing.capture import capture
from teraio.capturing.hardware import MachineDescription, known_machines
from teraio.capturing.pretended_gpu import GpuModel
