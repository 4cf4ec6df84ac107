"""The storage tier: blocks in preallocated spill files that end with the process."""

from runtime.storage.posix import PosixStore
from runtime.storage.run_directory import RunDirectory
from runtime.storage.store import Extent, Slot, Store

__all__ = ["Extent", "PosixStore", "RunDirectory", "Slot", "Store"]
