"""Keeps the blocks on the device within the budget."""

from runtime.paging.block import DROPPED, Block, State
from runtime.paging.block_transfers import BlockTransfers
from runtime.paging.debug import POISON, Debug
from runtime.paging.dropping import CopyRates
from runtime.paging.given_away import given_away
from runtime.paging.holder import holder_of
from runtime.paging.mover import Done, Mover, dropped_message
from runtime.paging.ownership import StorageOwnership
from runtime.paging.pager import Pager
from runtime.paging.room import out_of_memory
from runtime.paging.tiers import Tier, Tiers

__all__ = [
    "Block",
    "BlockTransfers",
    "CopyRates",
    "DROPPED",
    "Debug",
    "Done",
    "Mover",
    "POISON",
    "Pager",
    "State",
    "StorageOwnership",
    "Tier",
    "Tiers",
    "dropped_message",
    "given_away",
    "holder_of",
    "out_of_memory",
]
