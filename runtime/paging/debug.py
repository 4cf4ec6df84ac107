"""The debug mode: memory without content is poisoned, and a block that comes back, or is made anew, is compared with what left.

[Note: Debug mode]
Movers overwrite memory with POISON at two moments: when a block gives the memory up, before anybody else gets it, and just
before a block is copied into it. Code that reads too early, too late or at a wrong address then computes with absurd numbers,
instead of with old numbers that look right. Memory that is freed because its block has died is not poisoned.
On a device with streams these writes follow the rules for copies in [Note: What orders what]: the first is computation,
after the block's copies and before the memory is given back; the second goes before the copy in, in its lane.

The bytes of a block are hashed (XXH3, 64 bits) when its copy out begins. They are compared when the copy in has ended, before
a stage or user code sees them. A checksum follows pieces through a store; a hash covers the whole way: queues, streams, and
pages that are exchanged. A block that user code may have written to while it was away is not compared: user code can reach
the slot that stands in for the block. Movers report this by `distrust`. A copy out that is not valid because of a write is
never used, and so never compared; the next copy out is hashed again.
A block that is dropped is hashed as well, and compared with what its stage makes when it runs again, before anybody gets that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from xxhash import xxh3_64_intdigest

from planner.errors import ChecksumError, StorageError, UnsupportedError
from runtime.paging.block import Block
from runtime.storage import Extent

POISON = 0xFB
"""The byte that memory is filled with. Floats made of it are far from all values in training: -6.5e4 in 16 bits, -2.6e36 in
bfloat16 and 32 bits, -1.7e289 in 64 bits. Integers of 32 or 64 bits made of it are so low that any index is refused."""

_REMEDY = (
    "teraio has lost it on the way, or memory or a drive is damaged: run again with the option checksums, which finds what "
    "drives do; if it finds nothing, please report this"
)


class Debug:
    """The hashes of one mover's blocks, see [Note: Debug mode]. The pager's lock guards the calls, which hash at once."""

    def __init__(self) -> None:
        self._hashes: dict[Block, tuple[int, ...]] = {}
        self._dropped: dict[Block, int] = {}
        self._unseen: set[Block] = set()

    def leaves(self, block: Block, content: memoryview) -> None:
        """A copy out begins: hash the block's bytes, `content`. The block has its slot already."""
        self._hashes[block] = tuple(xxh3_64_intdigest(part) for _, part in _parts(block, content))

    def distrust(self, block: Block) -> None:
        """Do not compare the block when it comes back: user code may have changed its slot."""
        self._hashes.pop(block, None)

    def arrives(self, block: Block) -> None:
        """The block got memory that its copy in fills. `check` must be called before anybody uses it."""
        self._unseen.add(block)

    def check(self, blocks: Sequence[Block], read: Callable[[Block], memoryview]) -> None:
        """Compare those of `blocks` that nobody has seen since they came back. read: returns the bytes that a stage would see.

        Raises ChecksumError if the bytes differ, and again at each call until the block has left and come back.
        """
        for block in [block for block in blocks if block in self._unseen]:
            held = block.storage()  # its memory must stay while it is read
            if held is not None and block in self._hashes:
                self._compare(block, read(block))
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
        """The block is gone: drop its hashes."""
        self._hashes.pop(block, None)
        self._dropped.pop(block, None)
        self._unseen.discard(block)

    def _compare(self, block: Block, content: memoryview) -> None:
        for (extent, part), expected in zip(_parts(block, content), self._hashes[block], strict=True):
            found = xxh3_64_intdigest(part)
            if found != expected:
                raise ChecksumError(
                    path=str(extent.path),
                    offset_bytes=extent.offset_bytes,
                    block=block.name,
                    expected=expected,
                    found=found,
                    tier=block.tier,
                    remedy=_REMEDY,
                )


def _parts(block: Block, content: memoryview) -> Iterator[tuple[Extent, memoryview]]:
    """Yield each extent of the block's slot, with the bytes of the block that belong there."""
    if block.slot is None:
        raise StorageError(f"{block} has no slot; this is a bug in teraio, please report it")
    begin = 0
    for extent in block.slot.extents:
        yield extent, content[begin : begin + extent.length_bytes]  # slots are rounded up, blocks are not
        begin += extent.length_bytes
