"""A device that computes nothing: its clock goes on by what work is estimated to take, and its memory holds no bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NoReturn

import torch

from planner.errors import StorageError
from planner.schema import WaitingTier
from runtime.device import MIN_MOVED_BYTES, Span, WallMark
from runtime.paging import Block, Done
from runtime.storage import RangeCopy


class ModelledDevice:
    """A `Device` on which work takes the seconds that `advance` is told. Also the `MeasuredMemory` of its stages.

    now_seconds: the seconds of all work so far. allocated_bytes: 0, as everything counts from there. peak_bytes: what the stage
    that ran last has allocated, as `allocate` was told.
    """

    asynchronous = False
    allocated_bytes = 0

    def __init__(self) -> None:
        self.now_seconds = 0.0
        self.peak_bytes = 0

    def reset_peak(self) -> None:
        self.peak_bytes = 0

    def allocate(self, size_bytes: int) -> None:
        """A stage has allocated so many bytes at once, outputs included."""
        self.peak_bytes = max(self.peak_bytes, size_bytes)

    def advance(self, seconds: float) -> None:
        """Some work was done, which takes so long."""
        self.now_seconds += seconds

    def region(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def mark(self) -> WallMark:
        return WallMark(self.now_seconds)

    def synchronize(self) -> None:
        """Return at once: what was asked for has been done."""

    def try_memory(self, size_bytes: int) -> None:
        """Do nothing: there always is some."""

    def give_back_memory(self) -> None:
        """Do nothing: nothing is allocated."""

    def external_bytes(self, known_bytes: int) -> int:
        """Return 0: all memory is that of blocks."""
        return 0


class ResidentMover:
    """A `Mover` that says what could leave the device. There is no budget under a capture, so nothing ever does."""

    def span(self, storage: torch.UntypedStorage) -> Span | None:
        return Span(0, storage.nbytes()) if storage.nbytes() >= MIN_MOVED_BYTES else None

    def is_same(self, block: Block, storage: torch.UntypedStorage) -> bool:
        return True

    @property
    def keeps_mappings(self) -> bool:
        return False

    def maybe_replaced(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """Return none: fake storages have no memory that could be another one."""
        return ()

    def adopt(self, storage: torch.UntypedStorage) -> None: ...

    def leave(self, storage: torch.UntypedStorage) -> None: ...

    def trim(self, spare_bytes: int) -> None: ...

    def finished(self, block: Block) -> bool:
        return True

    def wait_resident(self, blocks: Sequence[Block]) -> None: ...

    def prioritize(self, block: Block) -> None: ...

    def check(self) -> None: ...

    def poll(self) -> None: ...

    def invalidate_mapping(self, block: Block) -> None: ...

    def host_address(self, block: Block) -> int | None:
        return None

    def forget(self, block: Block) -> None: ...

    def close(self) -> None: ...

    def together(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def has_room(self, block: Block, tier: WaitingTier) -> bool:
        return True

    def copy_out(self, block: Block, tier: WaitingTier | None, done: Done) -> bool:
        _refuse(block)

    def release(self, block: Block) -> None:
        _refuse(block)

    def discard(self, block: Block) -> None:
        _refuse(block)

    def renew(self, block: Block, fresh: torch.UntypedStorage) -> None:
        _refuse(block)

    def drop_copy(self, block: Block) -> None:
        _refuse(block)

    def copy_in(self, block: Block, done: Done) -> bool:
        _refuse(block)

    def install(self, block: Block) -> None:
        _refuse(block)

    def read_range(self, block: Block, begin_bytes: int, memory: torch.Tensor) -> RangeCopy:
        _refuse(block)

    def write_range(self, block: Block, begin_bytes: int, memory: torch.Tensor) -> RangeCopy:
        _refuse(block)


def _refuse(block: Block) -> NoReturn:
    raise StorageError(f"{block} moves while a step is captured; this is a bug in teraio, please report it")
