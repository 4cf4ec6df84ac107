"""All blocks, by the storage that they stand for."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from runtime.paging.block import DROPPED, Block
from runtime.paging.mover import Mover


class _Watch(weakref.ref[torch.UntypedStorage]):
    """Reports that a storage has died. PyTorch keeps the object that stands for a storage in Python as long as the storage."""

    __slots__ = ("key",)
    key: int


class BlockTable:
    """The blocks of one pager. The pager's lock guards changes and loops; a look-up of one storage needs no lock."""

    def __init__(self, mover: Mover | None) -> None:
        self._mover = mover
        self._blocks: dict[int, Block] = {}
        self._reported: deque[_Watch] = deque()  # storages die at any line, in any thread: their reports wait here
        self._dead: dict[Block, None] = {}

    def __iter__(self) -> Iterator[Block]:
        """All blocks, dead ones included, in the order in which they became known."""
        return iter(self._blocks.values())

    def find(self, storage: torch.UntypedStorage) -> Block | None:
        """Return the block of the storage, if there is one."""
        return self._blocks.get(storage._cdata)

    def add(self, block: Block, storage: torch.UntypedStorage) -> None:
        """Add the block of a storage that has none."""
        watch = _Watch(storage, self._reported.append)
        watch.key = block.key
        block.storage, self._blocks[block.key] = watch, block

    def remove(self, block: Block) -> None:
        """Remove a block that is in the table."""
        del self._blocks[block.key]

    def dead(self) -> list[Block]:
        """Return the blocks in the table whose storage has died."""
        while self._reported:
            block = self._blocks.get(self._reported[0].key)
            if block is not None and block.storage is self._reported[0]:  # most were forgotten before
                self._dead[block] = None
            self._reported.popleft()
        if self._dead:
            self._dead = {block: None for block in self._dead if self.holds(block)}
        return [block for block in self._dead if block.dead]

    def size_bytes(self, *, movable: bool) -> int:
        """Return the bytes of living blocks that can leave the device, wherever they are; if not `movable`, of all others."""
        size = sum(block.size_bytes for block in self if (block.span is not None) is movable)
        return size - sum(block.size_bytes for block in self.dead() if (block.span is not None) is movable)

    def holds(self, block: Block) -> bool:
        """Whether the block is in the table: it was not forgotten."""
        return self._blocks.get(block.key) is block

    def is_current(self, block: Block) -> bool:
        """Whether the block is in the table and its storage is alive."""
        return self._blocks.get(block.key) is block and block.storage() is not None

    def is_same(self, block: Block, storage: torch.UntypedStorage) -> bool:
        """Whether the storage has the size and the memory that the block was last seen with, or was moved to."""
        if block.size_bytes != storage.nbytes() or block.state is DROPPED:
            return block.size_bytes == storage.nbytes()
        return block.address == storage.data_ptr() if self._mover is None else self._mover.is_same(block, storage)

    def replaced(self) -> list[Block]:
        """Return the blocks to whose storage user code gave other memory (`share_memory_`, `resize_`)."""
        visible: Sequence[Block] = [block for block in self if block.user_visible]
        if self._mover is not None:
            visible = self._mover.maybe_replaced(visible)
        found = []
        for block in visible:
            held = block.storage()
            if held is not None and not self.is_same(block, held):
                found.append(block)
        return found
