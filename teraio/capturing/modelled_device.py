"""A device that computes nothing: its clock goes on by what work is estimated to take, and its memory holds no bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from runtime.device import MIN_MOVED_BYTES, Span, WallMark
from runtime.paging import Block, NullMover


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

    def keep_until_computed(self, storage: torch.UntypedStorage) -> None:
        """Do nothing: no memory is freed."""

    def try_memory(self, size_bytes: int) -> None:
        """Do nothing: there always is some."""

    def give_back_memory(self) -> None:
        """Do nothing: nothing is allocated."""

    def trim(self, spare_bytes: int) -> None:
        """Do nothing: nothing is kept for reuse."""

    def external_bytes(self, known_bytes: int) -> int:
        """Return 0: all memory is that of blocks."""
        return 0


class ResidentMover(NullMover):
    """A `Mover` that says what could leave the device. There is no budget under a capture, so nothing ever does."""

    def span(self, storage: torch.UntypedStorage, *, adopt: bool = False) -> Span | None:
        return Span(0, storage.nbytes()) if storage.nbytes() >= MIN_MOVED_BYTES else None

    def replaced(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """Return none: fake storages have no memory that could be another one."""
        return ()
