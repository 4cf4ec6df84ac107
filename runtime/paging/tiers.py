"""The tiers below the device, and which of them a block gets its slot in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.errors import StorageError, StorageFullError
from planner.schema import WaitingTier
from runtime.paging.block import Block
from runtime.storage import Store
from runtime.transfer import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One tier. store: its slots. engine: the I/O threads that copy; None where the device copies by itself."""

    name: WaitingTier
    store: Store
    engine: Engine | None

    def threads(self) -> Engine:
        """Return the engine. Raises StorageError for a tier without one."""
        if self.engine is None:
            raise StorageError(f"the tier {self.name} has no threads; this is a bug in teraio, please report it")
        return self.engine


class Tiers:
    """All tiers below the device, the fastest first. The pager's lock guards the calls."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = {tier.name: tier for tier in tiers}

    def __iter__(self) -> Iterator[Tier]:
        return iter(self._tiers.values())

    def of(self, block: Block) -> Tier:
        """Return the tier that the block has its slot in. Raises StorageError if it has none."""
        if block.tier is None:
            raise StorageError(f"{block} has no slot; this is a bug in teraio, please report it")
        return self._tiers[block.tier]

    def place(self, block: Block, size_bytes: int, wanted: WaitingTier | None) -> Tier:
        """Give the block a slot in the tier `wanted`, else in the first tier with room. A slot that the block has, it keeps
        unless another tier is wanted that has room. Returns the tier.

        Raises StorageFullError if no tier has room.
        """
        if block.tier is not None and wanted in (None, block.tier):
            return self._tiers[block.tier]
        before = block.tier
        full: StorageFullError | None = None
        try:
            for tier in sorted(self._tiers.values(), key=lambda tier: tier.name != wanted):
                if tier.name == before:
                    return tier
                try:
                    slot = tier.store.allocate(size_bytes, block.name)
                except StorageFullError as error:
                    full = full or error
                    continue
                try:
                    self.free(block)
                except BaseException:
                    tier.store.release(slot)
                    raise
                block.slot, block.tier = slot, tier.name
                return tier
            raise full or StorageError(f"{block} has nowhere to go; this is a bug in teraio, please report it")
        finally:
            full = None  # its traceback holds this frame, and that all callers' frames with the tensors in them

    def has_room(self, block: Block, size_bytes: int, wanted: WaitingTier) -> bool:
        """Whether the block has a slot in the tier, or could get one."""
        if block.tier == wanted or wanted not in self._tiers:
            return block.tier == wanted
        store = self._tiers[wanted].store
        return store.limit_bytes - store.used_bytes >= size_bytes

    def free(self, block: Block) -> None:
        """Free the block's slot, if it has one."""
        if block.slot is not None:
            self.of(block).store.release(block.slot)
            block.slot = block.tier = None
