"""The tiers below the device: slots for blocks in host memory and in preallocated spill files, and copies of their bytes."""

from runtime.storage.contents import Checksums, PageSums, UnchangedChunks
from runtime.storage.file_copies import PosixStore, StagedStore, compare_file
from runtime.storage.file_space import FileSpace
from runtime.storage.host import HostStore
from runtime.storage.kvikio import KvikioStore, load_kvikio
from runtime.storage.slots import (
    ALIGNMENT_BYTES,
    Chunk,
    ChunkIO,
    Extent,
    RangeCopy,
    Slot,
    align_up,
    cut_slot,
    in_turns,
    slot_range,
)
from runtime.storage.store import Store, map_slot
from runtime.storage.user_files import FileDiffers
