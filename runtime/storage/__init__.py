"""The tiers below the device: blocks in host memory, and in preallocated spill files that end with the process."""

from runtime.storage.checksums import Checksums
from runtime.storage.device_memory import DeviceMemory, HostMemory
from runtime.storage.host import HostStore
from runtime.storage.kvikio import KvikioStore
from runtime.storage.posix import PosixStore
from runtime.storage.run_directory import RunDirectory
from runtime.storage.slot_range import RangeCopy, in_turns, slot_range
from runtime.storage.staged import StagedStore
from runtime.storage.store import ALIGNMENT_BYTES, Chunk, Extent, Slot, Store, align_up, cut

__all__ = [
    "ALIGNMENT_BYTES",
    "Checksums",
    "Chunk",
    "DeviceMemory",
    "Extent",
    "HostMemory",
    "HostStore",
    "KvikioStore",
    "PosixStore",
    "RangeCopy",
    "RunDirectory",
    "Slot",
    "StagedStore",
    "Store",
    "align_up",
    "cut",
    "in_turns",
    "slot_range",
]
