"""The tiers below the device that blocks wait in, and who gets a slot where."""

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
    """Slots, and the threads that carry blocks to them and back; None where the device copies by itself."""

    name: WaitingTier
    store: Store
    engine: Engine | None

    def threads(self) -> Engine:
        """The engine of a tier that has one."""
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
        """Where the block has its slot."""
        if block.tier is None:
            raise StorageError(f"{block} has no slot; this is a bug in teraio, please report it")
        return self._tiers[block.tier]

    def place(self, block: Block, size_bytes: int, wanted: WaitingTier | None) -> Tier:
        """Give the block a slot in the tier that is wanted, else in the first one with room; one that it has it keeps.

        Raises StorageFullError if there is no room in any.
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
                self.free(block)
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
        """Take the block's slot back, if it has one."""
        if block.slot is not None:
            self.of(block).store.release(block.slot)
            block.slot = block.tier = None
