"""Slots that are mapped for reading while they stay in their store."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from weakref import WeakKeyDictionary

import torch

from planner.errors import StorageError
from runtime.storage.slot_store import Store
from runtime.storage.store import Slot

_NO_ACCESS, _FIXED, _PRIVATE, _ANONYMOUS = 0, 0x10, mmap.MAP_PRIVATE, mmap.MAP_ANONYMOUS
_FAILED = ctypes.c_void_p(-1).value


_READERS: WeakKeyDictionary[Slot, weakref.ref[torch.UntypedStorage]] = WeakKeyDictionary()


def reader_of(slot: Slot) -> torch.UntypedStorage | None:
    """Return what is mapped over a slot by `map_slot`; None if nothing is."""
    reader = _READERS.get(slot) if _READERS else None
    return None if reader is None else reader()


def map_slot(store: Store, slot: Slot, lead_bytes: int, size_bytes: int) -> torch.UntypedStorage:
    """Return a storage in main memory over so many bytes of a slot from `lead_bytes` on, read from its file as they are touched.

    One for all who ask while it lives. What is written to it stays in main memory. The store keeps the slot as long, see
    `Store.keep`; while the store is open, the caller sees to it that no other block gets the slot meanwhile. Raises
    StorageError if the system refuses the mapping, StorageIOError if the slot is in a file of the user that has changed.
    """
    found = reader_of(slot)
    if found is not None:
        return found
    if slot.file is not None:
        slot.file.check(slot.name)  # whoever touches what is mapped beyond the end of a file ends the process
    base = _map(None, slot.size_bytes, _NO_ACCESS, _PRIVATE | _ANONYMOUS, -1, 0)
    try:
        at = base
        for extent in slot.extents:
            access = mmap.PROT_READ | mmap.PROT_WRITE
            _map(at, extent.length_bytes, access, _PRIVATE | _FIXED, extent.file_descriptor, extent.offset_bytes)
            at += extent.length_bytes
    except BaseException:
        _unmap(base, slot.size_bytes)
        raise
    memory = (ctypes.c_char * size_bytes).from_address(base + lead_bytes)
    weakref.finalize(memory, _unmap, base, slot.size_bytes).atexit = False
    found = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    weakref.finalize(found, store.keep(slot)).atexit = False
    _READERS[slot] = weakref.ref(found)
    return found


def _map(address: int | None, length_bytes: int, access: int, flags: int, descriptor: int, offset: int) -> int:
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    found: int | None = call(address, length_bytes, access, flags, descriptor, offset)
    if found is None or found == _FAILED:
        raise StorageError(
            f"mmap of {length_bytes} bytes failed: {os.strerror(ctypes.get_errno())}; if memory is free, raise vm.max_map_count"
        )
    return found


def _unmap(address: int, length_bytes: int) -> None:
    call = ctypes.CDLL(None).munmap
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    call(address, length_bytes)
