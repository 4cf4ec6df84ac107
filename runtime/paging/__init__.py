"""Keeps the blocks on the device within the budget."""

from runtime.paging.block import DROPPED, PLAIN, UNNAMED, Block, LeftBehind, State, StorageOwnership, given_away, holder_of
from runtime.paging.checked import POISON, CheckedMover
from runtime.paging.eviction import out_of_memory
from runtime.paging.mover import Done, Mover, NullMover, Tier, Tiers, dropped_message, slot_of, span_of, storage_of
from runtime.paging.pager import Pager
