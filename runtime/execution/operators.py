"""Runs operators that user code calls, outside of compiled graphs, like stages: under the budget of a pager."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch.utils._pytree import tree_leaves

from runtime.device import MIN_MOVED_BYTES
from runtime.paging import UNNAMED, Block, Pager, holder_of
from runtime.system import storage_swap, uninterrupted

_Result = TypeVar("_Result")


class OperatorRunner:
    """Brings what an operator reads to the device of `pager`, and makes blocks of its large results. For the training thread.

    device: where the blocks are; what operators do with tensors of other devices is not managed.
    """

    def __init__(self, pager: Pager, device: torch.device) -> None:
        self.pager = pager
        self._device = device

    def run(
        self,
        call: Callable[[], _Result],
        *,
        name: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        new_bytes: int,
    ) -> _Result:
        """Call an operator and return what it returns. Waits until what it needs is there, and has room.

        name: for errors. new_bytes: of its results. Raises BudgetError if all of this does not fit at once, StorageFullError and
        StorageError as stages do.
        """
        pager = self.pager
        with uninterrupted(), pager.region(self._blocks([*reads, *writes])):
            read, written = self._blocks(reads), self._blocks(writes)
            pager.acquire(read, new_bytes, name)
            try:
                result = call()
                for tensor in tree_leaves(result):
                    if self._is_large(tensor):
                        pager.block_of(tensor, name=UNNAMED, kind="activation", user_visible=True)
            finally:
                pager.retire(read, written)
        return result

    def take_in(self, tensor: torch.Tensor) -> None:
        """Make a block of a tensor that other code has made. Waits until its data is in memory that it can leave."""
        if self._is_large(tensor):
            self.run(lambda: self._moved(tensor), name="a tensor of user code", reads=(), writes=(), new_bytes=tensor.nbytes)

    def in_file(
        self, path: Path, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype, name: str = UNNAMED
    ) -> torch.Tensor:
        """Return a tensor on the device whose only copy is in a file, in row-major order. Reads nothing, and takes no memory.

        Raises UnsupportedError without a storage tier, StorageIOError if the file cannot be used.
        """
        size_bytes = math.prod(shape) * dtype.itemsize
        storage = self.pager.block_in_file(name, "parameter", path=path, offset_bytes=offset_bytes, size_bytes=size_bytes)
        return storage_swap.tensor_over(storage, dtype, tuple(shape))

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pager.make_movable(tensor)
        return tensor

    def _blocks(self, tensors: Sequence[torch.Tensor]) -> list[Block]:
        return list(dict.fromkeys(block for block in self.pager.known_blocks(tensors) if block is not None))

    def _is_large(self, value: object) -> bool:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return False
        storage = holder_of(value).untyped_storage()
        # What is not resizable is lent, by a mapped file or by NumPy: it takes no memory of the device, and cannot leave.
        return storage.device == self._device and storage.nbytes() >= MIN_MOVED_BYTES and storage.resizable()
