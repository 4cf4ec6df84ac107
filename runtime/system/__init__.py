"""What the machine and its operating system give: NUMA nodes, memory limits, pinning, native code, signals; profilers.

And, by native code, other memory for tensors.
"""

from runtime.system import native, storage_swap
from runtime.system.annotation import Name, annotate, first_of
from runtime.system.garbage import QuietCollector, all_objects, frozen
from runtime.system.host_pages import PIN_CHUNK_BYTES, CudaPinner, locked_limit, on_processors, pci_address, processors_near
from runtime.system.interrupts import checkpoint, forget_undo, interruptible, undo_if_interrupted, uninterrupted
from runtime.system.limits import HostLimit, check_host_memory, host_limits, machine_cores
from runtime.system.missing_gpu import missing_gpu
