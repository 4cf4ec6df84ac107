"""What the budget counts."""

from __future__ import annotations

from runtime.paging.block import OFFLOADED, OFFLOADING, ON_DEVICE, PREFETCHING, Block, State

NO_LIMIT = 1 << 62
"""Free bytes where there is no budget."""


class MemoryAccount:
    """Bytes on the device that count against the budget. The pager's lock guards all changes.

    budget_bytes: limit of `total_bytes`; None for no limit.
    fixed_bytes: bytes that other parts of teraio keep on the device and have reported, such as small optimizer states.
    external_bytes: other bytes that the device had when the current region began, such as tensors of user code.
    used_bytes: blocks on the device, including those that are being copied in or out.
    reserved_bytes: what the stage that begins, or runs, will allocate: outputs, workspace, and inputs that must come back.
    offloading_bytes: blocks that are OFFLOADING. They still count as used.
    prefetching_blocks: number of blocks that are PREFETCHING.
    peak_bytes: the highest `total_bytes` so far.
    here: the blocks that count as used, or whose slots are lent. Others may be among them where memory ran out.
    moves: number of blocks so far whose memory was allocated for a copy in, or has gone.
    """

    def __init__(self, budget_bytes: int | None) -> None:
        self.budget_bytes = budget_bytes
        self.fixed_bytes = 0
        self.external_bytes = 0
        self.used_bytes = 0
        self.reserved_bytes = 0
        self.offloading_bytes = 0
        self.prefetching_blocks = 0
        self.peak_bytes = 0
        self.moves = 0
        self.here: dict[Block, None] = {}

    @property
    def unmoved_bytes(self) -> int:
        """Bytes on the device that are not in blocks and are not reserved."""
        return self.fixed_bytes + self.external_bytes

    @property
    def total_bytes(self) -> int:
        """All bytes that count against the budget."""
        return self.used_bytes + self.reserved_bytes + self.fixed_bytes + self.external_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that the budget leaves; negative while room is being made."""
        if self.budget_bytes is None:
            return NO_LIMIT
        return self.budget_bytes - self.used_bytes - self.reserved_bytes - self.fixed_bytes - self.external_bytes

    @property
    def unused_bytes(self) -> int:
        """Bytes that the budget leaves to the running stage and to memory that is kept for reuse."""
        return self.free_bytes + self.reserved_bytes

    def short_bytes(self, wanted_bytes: int) -> int:
        """Return how many of `wanted_bytes` are missing, apart from what is reserved; negative if more are free."""
        return wanted_bytes - self.unused_bytes

    def note_peak(self) -> None:
        """Update `peak_bytes`."""
        total = self.used_bytes + self.reserved_bytes + self.fixed_bytes + self.external_bytes
        if total > self.peak_bytes:
            self.peak_bytes = total

    def recognise(self, size_bytes: int) -> None:
        """Count memory as a block that was there when the region began, and so was counted as external."""
        self.external_bytes = max(self.external_bytes - size_bytes, 0)

    # -- blocks change their state. State and counts change in one statement: where memory runs out, both do or none does

    def begin_offload(self, block: Block) -> None:
        """A block becomes OFFLOADING; its memory still counts."""
        block.state, self.offloading_bytes = OFFLOADING, self.offloading_bytes + block.size_bytes

    def end_offload(self, block: Block) -> None:
        """A block is no longer OFFLOADING but ON_DEVICE; its memory still counts, see `remove`."""
        block.state, self.offloading_bytes = ON_DEVICE, self.offloading_bytes - block.size_bytes

    def begin_prefetch(self, block: Block) -> None:
        """A block becomes PREFETCHING; its memory counts from now on."""
        self.here[block] = None
        used, blocks, self.moves = self.used_bytes + block.size_bytes, self.prefetching_blocks + 1, self.moves + 1
        total, peak = used + self.reserved_bytes + self.fixed_bytes + self.external_bytes, self.peak_bytes
        peak = total if total > peak else peak
        block.state, self.used_bytes, self.prefetching_blocks, self.peak_bytes = PREFETCHING, used, blocks, peak

    def end_prefetch(self, block: Block) -> None:
        """A block is no longer PREFETCHING but ON_DEVICE; its memory still counts, see `remove`."""
        block.state, self.prefetching_blocks = ON_DEVICE, self.prefetching_blocks - 1

    def remove(self, block: Block, state: State = OFFLOADED) -> None:
        """The memory of a block that is ON_DEVICE leaves, or is freed; the block is in `state` now."""
        used, moves = self.used_bytes - block.size_bytes, self.moves + 1
        block.state, self.used_bytes, self.moves, _ = state, used, moves, self.here.pop(block, None)

    def add(self, block: Block) -> None:
        """A block is ON_DEVICE: it has become known, got memory, or keeps what was removed."""
        used = self.used_bytes + block.size_bytes
        self.here[block], block.state, self.used_bytes = None, ON_DEVICE, used
