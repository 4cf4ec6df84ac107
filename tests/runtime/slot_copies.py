"""Copies of whole slots, for tests of stores and of what uses them."""

from __future__ import annotations

from runtime.storage import ChunkIO, Slot, cut_slot

_CHUNK_BYTES = 256 << 20


def write_slot(store: ChunkIO, slot: Slot, address: int) -> None:
    """Write a whole slot from memory, and wait until it is written."""
    for chunk in cut_slot(slot, _CHUNK_BYTES):
        store.write_chunk(slot, chunk, address)


def read_slot(store: ChunkIO, slot: Slot, address: int) -> None:
    """Read a whole slot into memory, and wait until it is read."""
    for chunk in cut_slot(slot, _CHUNK_BYTES):
        store.read_chunk(slot, chunk, address)


COPIES = {"write": write_slot, "read": read_slot}
"""The two copies by name, for parametrized tests."""
