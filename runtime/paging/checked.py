"""The debug mode: memory without content is poisoned, and a block that comes back, or is recomputed, is compared with what left.

[Note: Debug mode]
Movers that `poison` overwrite memory with POISON at two moments: when a block gives the memory up, before anybody else gets it,
and just before a block is copied into it. Code that reads too early, too late or at a wrong address then computes with absurd
numbers, instead of with old numbers that look right. Memory that is freed because its block has died is not poisoned.
On a device with streams these writes follow the rules for copies in [Note: What orders what]: the first is computation,
after the block's copies and before the memory is given back; the second goes before the copy in, in its lane.

The pages of a block are summed when its copy out begins. They are compared when the copy in has ended, before a stage or user
code sees them. A checksum follows pieces through a store; these sums cover the whole way: queues, streams, and pages that are
exchanged. What is written to the slot meanwhile is summed too. Where nobody can tell what was written, the block is not compared.
A copy out that is not valid because of a write is never used, and so never compared; the next copy out is summed again.
A block that is dropped is hashed, and compared with what its stage makes when it runs again, before anybody gets that.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Sequence

import torch
from xxhash import xxh3_64_intdigest

from planner.errors import ChecksumError, StorageError, UnsupportedError
from planner.schema import WaitingTier
from runtime.device import Span
from runtime.paging.block import DROPPED, Block
from runtime.paging.mover import Done, Mover, in_file
from runtime.storage import PageSums, RangeCopy, Slot
from runtime.system import storage_swap

# The byte that memory is filled with. Floats made of it are far from all values in training: -6.5e4 in 16 bits, -2.6e36 in
# bfloat16 and 32 bits, -1.7e289 in 64 bits. Integers of 32 or 64 bits made of it are so low that any index is refused.
POISON = 0xFB

_REMEDY = (
    "teraio has lost it on the way, or memory or a drive is damaged: run again with the option checksums, which finds what "
    "drives do; if it finds nothing, please report this"
)

_log = logging.getLogger("teraio")


class CheckedMover:
    """A `Mover` around another one: it compares what comes back with what left, see [Note: Debug mode].

    read: returns bytes of the device, from an address on, as a stage that runs next would see them; with True, as a
    copy out that begins next. debug: whether it compares;
    without it, it only moves, for those that inherit from it.
    """

    def __init__(self, mover: Mover, read: Callable[[int, int, bool], memoryview], *, debug: bool = True) -> None:
        self.tiers, self.together = mover.tiers, mover.together
        self._mover = mover
        self._read = read
        self._debug = debug
        self._told = False
        self._sums: dict[Block, PageSums] = {}
        self._dropped: dict[Block, int] = {}
        self._unseen: set[Block] = set()  # blocks that have come back, and that nobody may use before they were compared

    def span(self, storage: torch.UntypedStorage, *, adopt: bool = False) -> Span | None:
        return self._mover.span(storage, adopt=adopt)

    def replaced(self, blocks: Sequence[Block]) -> Sequence[Block]:
        return self._mover.replaced(blocks)

    def begin_in_file(self, slot: Slot) -> tuple[Block, torch.UntypedStorage]:
        if not self._told:
            self._told = True
            _log.warning(
                "option checksums or debug: weights that stay in %s and other files are checked against their first read",
                slot.extents[0].path,
            )
        return self._mover.begin_in_file(slot)

    def finished(self, blocks: Iterable[Block]) -> list[Block]:
        return self._mover.finished(blocks)

    def copy_out(self, block: Block, tier: WaitingTier | None, done: Done) -> bool:
        if self._debug:
            self._mover.wait_resident([block])  # else its last copy in may still write what is summed here
            self._sums[block] = sums = PageSums(block.size_bytes)
            sums.note(0, _address(content := self._read(block.address, block.size_bytes, True)), len(content))
        return self._mover.copy_out(block, tier, done)

    def copy_in(self, block: Block, done: Done) -> bool:
        return self._mover.copy_in(block, done)

    def release(self, block: Block) -> None:
        if self._debug and block.state is DROPPED:
            self._mover.wait_resident([block])
            self._dropped[block] = xxh3_64_intdigest(self._content(block))
        self._mover.release(block)

    def install(self, block: Block, fresh: torch.UntypedStorage | None = None) -> None:
        if self._debug and fresh is not None and block in self._dropped:
            self._compare_recomputed(block, fresh)
        self._mover.install(block, fresh)
        if self._debug and fresh is None:
            self._unseen.add(block)

    def wait_resident(self, blocks: Sequence[Block]) -> None:
        """Wait as the mover does, and compare those that nobody has seen since they came back.

        A block that differs stays unseen: the error comes again at each call until the block has left and come back.
        """
        self._mover.wait_resident(blocks)
        for block in [block for block in blocks if block in self._unseen]:
            held = block.storage()  # its memory must stay while it is read
            if held is not None and (block in self._sums or in_file(block)):
                content = self._content(block)
                self.compare(block, 0, _address(content), len(content))
                if block not in self._sums:  # a file of the user, read for the first time
                    self._sums[block] = sums = PageSums(block.size_bytes)
                    sums.note(0, _address(content), len(content))
            self._unseen.discard(block)

    def copy_range(self, block: Block, begin_bytes: int, memory: torch.Tensor, *, to_slot: bool) -> RangeCopy:
        if to_slot and block in self._sums:
            content = self._read(memory.data_ptr(), memory.nbytes, True)
            self.written(block, begin_bytes, _address(content), len(content))
        return self._mover.copy_range(block, begin_bytes, memory, to_slot=to_slot)

    def invalidate(self, blocks: Iterable[Block]) -> None:
        changed = list(blocks)
        # Others can reach these where they wait, by a mapping or in the host tier: nobody tells what they write.
        for block in changed:
            if self.tiers.mapped or block.tier == "host":
                self.distrust(block)
        self._mover.invalidate(changed)

    def forget(self, block: Block) -> None:
        self._sums.pop(block, None)
        self._dropped.pop(block, None)
        self._unseen.discard(block)
        self._mover.forget(block)

    # -- the sums of what is in the slots

    def written(self, block: Block, begin_bytes: int, address: int, length_bytes: int) -> None:
        """The bytes at `address` are written to the block's slot, from `begin_bytes` on."""
        if block in self._sums:
            self._sums[block].note(begin_bytes, address, min(length_bytes, block.size_bytes - begin_bytes))

    def compare(self, block: Block, begin_bytes: int, address: int, length_bytes: int) -> None:
        """Compare the bytes at `address` with those that the slot should hold. Raises ChecksumError if they differ."""
        if block not in self._sums:
            return
        difference = self._sums[block].compare(begin_bytes, address, min(length_bytes, block.size_bytes - begin_bytes))
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

    def _compare_recomputed(self, block: Block, fresh: torch.UntypedStorage) -> None:
        """Compare what a stage has recomputed with what was dropped."""
        found = xxh3_64_intdigest(self._read(storage_swap.address(fresh), block.size_bytes, False))
        expected = self._dropped[block]
        if found != expected:
            raise UnsupportedError(
                f"{block.name} was recomputed with other bytes: its checksum was {expected:016x} and is {found:016x}; its stage "
                "does not give the same result twice; set the option recompute='off', and report this"
            )
        del self._dropped[block]

    def _content(self, block: Block) -> memoryview:
        return self._read(block.address, block.size_bytes, False)


def _address(content: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(content))


def _in_file(block: Block, offset_bytes: int) -> tuple[str, int]:
    """Return the file and the place in it of a byte of the block."""
    if block.slot is not None and block.span is not None:
        offset_bytes += max(block.slot.lead_bytes, block.span.lead_bytes)
    for extent in () if block.slot is None else block.slot.extents:
        if offset_bytes < extent.length_bytes:
            return str(extent.path), extent.offset_bytes + offset_bytes
        offset_bytes -= extent.length_bytes
    raise StorageError(f"{block} has no slot; this is a bug in teraio, please report it")
