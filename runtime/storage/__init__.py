"""The tiers below the device: blocks in host memory, and in preallocated spill files that end with the process."""

from runtime.storage.host import HostStore
from runtime.storage.kvikio import KvikioStore
from runtime.storage.posix import PosixStore
from runtime.storage.run_directory import RunDirectory
from runtime.storage.staged import StagedStore
from runtime.storage.store import Extent, Slot, Store

__all__ = ["Extent", "HostStore", "KvikioStore", "PosixStore", "RunDirectory", "Slot", "StagedStore", "Store"]
