"""The debug mode: memory without content is poisoned, and a block that comes back, or is made anew, is compared with what left.

[Note: Debug mode]
Movers overwrite memory with POISON at two moments: when a block gives the memory up, before anybody else gets it, and just
before a block is copied into it. Code that reads too early, too late or at a wrong address then computes with absurd numbers,
instead of with old numbers that look right. Memory that is freed because its block has died is not poisoned.
On a device with streams these writes follow the rules for copies in [Note: What orders what]: the first is computation,
after the block's copies and before the memory is given back; the second goes before the copy in, in its lane.

The pages of a block are summed when its copy out begins. They are compared when the copy in has ended, before a stage or user
code sees them. A checksum follows pieces through a store; these sums cover the whole way: queues, streams, and pages that are
exchanged. What is written to the slot meanwhile is summed too (`written`), after what user code has touched was compared. Where
a mover does not know what was written, it says so by `distrust`, and the block is not compared. A copy out that is not valid
because of a write is never used, and so never compared; the next copy out is summed again.
A block that is dropped is hashed, and compared with what its stage makes when it runs again, before anybody gets that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from xxhash import xxh3_64_intdigest

from planner.errors import ChecksumError, StorageError, UnsupportedError
from runtime.paging.block import Block
from runtime.storage import PageSums

POISON = 0xFB
"""The byte that memory is filled with. Floats made of it are far from all values in training: -6.5e4 in 16 bits, -2.6e36 in
bfloat16 and 32 bits, -1.7e289 in 64 bits. Integers of 32 or 64 bits made of it are so low that any index is refused."""

_REMEDY = (
    "teraio has lost it on the way, or memory or a drive is damaged: run again with the option checksums, which finds what "
    "drives do; if it finds nothing, please report this"
)


class Debug:
    """The sums of one mover's blocks, see [Note: Debug mode]. The pager's lock guards the calls, which sum at once."""

    def __init__(self) -> None:
        self._sums: dict[Block, PageSums] = {}
        self._dropped: dict[Block, int] = {}
        self._unseen: set[Block] = set()

    def leaves(self, block: Block, content: memoryview) -> None:
        """A copy out begins: sum the block's bytes, `content`."""
        sums = PageSums(len(content))
        sums.note(0, _address(content), len(content))
        self._sums[block] = sums

    def written(self, block: Block, begin_bytes: int, address: int, length_bytes: int) -> None:
        """The bytes at `address` are written to the block's slot, from `begin_bytes` on."""
        if block in self._sums:
            self._sums[block].note(begin_bytes, address, min(length_bytes, block.size_bytes - begin_bytes))

    def compare(self, block: Block, begin_bytes: int, address: int, length_bytes: int) -> None:
        """Compare the bytes at `address` with those that the slot should hold. Raises ChecksumError if they differ."""
        if block not in self._sums:
            return
        length = min(length_bytes, block.size_bytes - begin_bytes)
        difference = self._sums[block].compare(begin_bytes, address, length)
        if difference is not None:
            path, offset = _in_file(block, difference.offset_bytes)
            raise ChecksumError(
                path=path,
                offset_bytes=offset,
                block=block.name,
                expected=difference.expected,
                found=difference.found,
                tier=block.tier,
                remedy=_REMEDY,
            )

    def distrust(self, block: Block) -> None:
        """Do not compare the block when it comes back: its slot may have been changed, and nobody knows where."""
        self._sums.pop(block, None)

    def arrives(self, block: Block) -> None:
        """The block got memory that its copy in fills. `check` must be called before anybody uses it."""
        self._unseen.add(block)

    def check(self, blocks: Sequence[Block], read: Callable[[Block], memoryview]) -> None:
        """Compare those of `blocks` that nobody has seen since they came back. read: returns the bytes that a stage would see.

        Raises ChecksumError if the bytes differ, and again at each call until the block has left and come back.
        """
        for block in [block for block in blocks if block in self._unseen]:
            held = block.storage()  # its memory must stay while it is read
            if held is not None and block in self._sums:
                content = read(block)
                self.compare(block, 0, _address(content), len(content))
            self._unseen.discard(block)

    def drops(self, block: Block, content: memoryview) -> None:
        """The block is dropped: hash its bytes, `content`."""
        self._dropped[block] = xxh3_64_intdigest(content)

    def made_anew(self, block: Block, content: memoryview) -> None:
        """Compare what a stage has made anew with what was dropped. Raises UnsupportedError if the bytes differ."""
        found, expected = xxh3_64_intdigest(content), self._dropped[block]
        if found != expected:
            raise UnsupportedError(
                f"{block.name} was made anew with other bytes: its checksum was {expected:016x} and is {found:016x}; its stage "
                "does not give the same result twice; set the option recompute='off', and report this"
            )
        del self._dropped[block]

    def forget(self, block: Block) -> None:
        """The block is gone: drop its sums."""
        self._sums.pop(block, None)
        self._dropped.pop(block, None)
        self._unseen.discard(block)


def _address(content: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(content))


def _in_file(block: Block, offset_bytes: int) -> tuple[str, int]:
    """Return the file and the place in it of a byte of the block's slot."""
    for extent in () if block.slot is None else block.slot.extents:
        if offset_bytes < extent.length_bytes:
            return str(extent.path), extent.offset_bytes + offset_bytes
        offset_bytes -= extent.length_bytes
    raise StorageError(f"{block} has no slot; this is a bug in teraio, please report it")
