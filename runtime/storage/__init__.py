"""The tiers below the device: slots for blocks in host memory and in preallocated spill files, and copies of their bytes."""

from runtime.storage.checksums import Checksums
from runtime.storage.host import HostStore
from runtime.storage.kvikio import KvikioStore, load_kvikio
from runtime.storage.page_sums import PageSums
from runtime.storage.posix import PosixStore
from runtime.storage.slot_range import RangeCopy, in_turns, slot_range
from runtime.storage.staged import StagedStore
from runtime.storage.store import ALIGNMENT_BYTES, Chunk, ChunkIO, Extent, Slot, Store, align_up, cut_slot
from runtime.storage.unchanged import UnchangedChunks

__all__ = [
    "ALIGNMENT_BYTES",
    "Checksums",
    "Chunk",
    "ChunkIO",
    "Extent",
    "HostStore",
    "KvikioStore",
    "PageSums",
    "PosixStore",
    "RangeCopy",
    "Slot",
    "StagedStore",
    "Store",
    "UnchangedChunks",
    "align_up",
    "cut_slot",
    "in_turns",
    "load_kvikio",
    "slot_range",
]
