"""Without a plan: which blocks leave by being dropped, because their stage makes them anew sooner than copies take."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.paging.account import MemoryAccount
from runtime.paging.block import DROPPED, ON_DEVICE, Block, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRates:
    """Bytes per second to the lower tier that blocks leave for, and back."""

    out_bytes_per_second: float
    in_bytes_per_second: float


_SPARE_SHARE = 8
"""This part of the budget is left for small blocks that the backward pass makes before a re-run, and that cannot leave."""


class DropChoice:
    """Compares both ways. rates: of the links; None: never drop. With the pager's lock held."""

    def __init__(self, account: MemoryAccount) -> None:
        self.rates: CopyRates | None = None
        self._account = account

    def is_better(self, block: Block) -> bool:
        """Whether a re-run takes less time than to copy the block out, after what is queued there, and in.

        Inputs of the re-run that are away count as copies in. A block whose stage needs another dropped block is not dropped: one
        re-run must do. Nor is one whose stage may not fit next to what cannot leave.
        """
        source, rates = block.source, self.rates
        if rates is None or source is None or not block.can_be_dropped or block.copy_is_valid:
            return False
        if source.seconds is None or any(each.state is DROPPED for each in source.read):
            return False
        away_bytes = sum(each.size_bytes for each in source.read if each.state is not ON_DEVICE)
        again = source.seconds + away_bytes / rates.in_bytes_per_second
        out = (self._account.offloading_bytes + block.size_bytes) / rates.out_bytes_per_second
        return again < out + block.size_bytes / rates.in_bytes_per_second and self._fits(source)

    def _fits(self, source: Source) -> bool:
        """Whether the re-run will find room, whatever cannot leave by then. A copy needs none but for the block itself."""
        account = self._account
        if account.budget_bytes is None:
            return True
        stays = account.unmoved_bytes + sum(block.size_bytes for block in account.here if block.span is None)
        return stays + source.need_bytes <= account.budget_bytes - account.budget_bytes // _SPARE_SHARE
