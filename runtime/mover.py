"""Carries blocks of the CPU device tier to their slots and back; knows memory and files, nothing of budgets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar, Protocol

import torch

from planner.errors import StorageError
from runtime.block import Block
from runtime.cpu_memory import CpuMemory, Span
from runtime.engine import Engine, Transfer
from runtime.storage.store import Store

Done = Callable[[StorageError | None], None]
"""Called once, in an I/O thread, when a copy has ended; with the error if it failed."""


class Mover(Protocol):
    """What the pager needs of a device tier. Copies return at once; the other calls are short."""

    def span(self, storage: torch.UntypedStorage) -> Span | None:
        """The part of `storage` that can leave the device, None if it has to stay."""

    def adopt(self, storage: torch.UntypedStorage) -> None:
        """Move the data of `storage` to memory that can leave the device, if it is not there and may be moved."""

    def trim(self, spare_bytes: int) -> None:
        """So much of the budget is not in use: free memory that is kept for reuse may be that large."""

    def copy_out(self, block: Block, done: Done) -> None:
        """Begin to write a block to its slot. Raises StorageFullError if there is no room for a slot."""

    def release(self, block: Block) -> None:
        """Give the memory of a block back whose slot is valid; the slot stands in for it from now on."""

    def copy_in(self, block: Block, done: Done) -> None:
        """Begin to read a block from its slot into fresh memory, beside what stands in for it."""

    def install(self, block: Block) -> None:
        """Put the memory that `copy_in` filled in place."""

    def hurry(self, block: Block) -> None:
        """A copy of this block that has not begun goes to the front of its link."""

    def check(self) -> None:
        """Raises StorageIOError if a copy has made no progress for too long: its drive does not answer any more."""

    def settle(self, block: Block) -> None:
        """User code may have touched what stands in for a block: take it out of the resident set again."""

    def forget(self, block: Block) -> None:
        """The block is gone: free its slot."""

    def close(self) -> None:
        """Nothing will be moved any more. All blocks are on the device."""


class CpuMover:
    """A `Mover` between main memory and spill files, see [Note: Pages leave, addresses stay].

    One storage can have one mover only: a second one would map its own slot over the pages, and writes would go to
    one slot and be read from the other. Where several runtimes use a storage, it stays put for all but the first.
    """

    _movers: ClassVar[dict[int, CpuMover]] = {}
    """Who carries a storage, by block key; changed under `_claiming`."""
    _claiming: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, memory: CpuMemory, store: Store, engine: Engine) -> None:
        self._memory = memory
        self._store = store
        self._engine = engine
        self._arrived: dict[Block, Span] = {}
        self._transfers: dict[Block, Transfer] = {}

    def span(self, storage: torch.UntypedStorage) -> Span | None:
        span = self._memory.span(storage)
        if span is None:
            return None
        with self._claiming:
            return span if self._movers.setdefault(storage._cdata, self) is self else None

    def adopt(self, storage: torch.UntypedStorage) -> None:
        self._memory.adopt(storage)

    def trim(self, spare_bytes: int) -> None:
        self._memory.trim(spare_bytes)

    def copy_out(self, block: Block, done: Done) -> None:
        span = _span(block)
        if block.slot is None:
            block.slot = self._store.allocate(span.length_bytes, block.name)
        self._begin(self._engine.write, block, span.address, done)

    def release(self, block: Block) -> None:
        if block.slot is None:
            raise StorageError(f"{block} was released without a copy; this is a bug in teraio, please report it")
        self._memory.map_files(_span(block), block.slot.extents, keep_pages=not block.user_visible)

    def copy_in(self, block: Block, done: Done) -> None:
        area = self._memory.take_pages(_span(block).length_bytes)
        self._arrived[block] = area

        def landed(error: StorageError | None) -> None:
            if error is not None:
                self._memory.drop_pages(self._arrived.pop(block))
            done(error)

        try:
            self._begin(self._engine.read, block, area.address, landed)
        except StorageError:
            self._memory.drop_pages(self._arrived.pop(block))
            raise

    def install(self, block: Block) -> None:
        self._memory.install_pages(self._arrived.pop(block), _span(block))

    def hurry(self, block: Block) -> None:
        if block in self._transfers:
            self._transfers[block].promote()

    def check(self) -> None:
        self._engine.check()

    def settle(self, block: Block) -> None:
        self._memory.forget_cached(_span(block))

    def forget(self, block: Block) -> None:
        self._transfers.pop(block, None)
        with self._claiming:
            if self._movers.get(block.key) is self:
                del self._movers[block.key]
        if block.slot is not None:
            self._store.release(block.slot)
            block.slot = None

    def close(self) -> None:
        """Give up all storages, which must be on the device."""
        with self._claiming:
            for key in [key for key, mover in self._movers.items() if mover is self]:
                del self._movers[key]

    def _begin(self, submit: Callable[..., Transfer], block: Block, address: int, done: Done) -> None:
        """Hand a copy to the engine; the storage stays alive until it has ended, also if everyone else lets go of it."""
        storage = block.storage()
        if storage is None or block.slot is None:
            raise StorageError(f"{block} has no memory to copy; this is a bug in teraio, please report it")
        held = [storage]  # not one entry for each block: `done` may begin the next copy of this one

        def ended(transfer: Transfer) -> None:
            try:
                done(transfer.error)
            finally:
                held.clear()

        self._transfers[block] = submit(block.slot, address, ended)


def _span(block: Block) -> Span:
    if block.span is None:
        raise StorageError(f"{block} cannot move; this is a bug in teraio, please report it")
    return block.span
