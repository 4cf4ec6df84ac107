"""How one stage runs: its memory is measured, its collectives are timed, and it runs once more where memory is short.

Also how operators run that user code calls, outside of compiled graphs: like stages, under the budget of a pager.

[Note: Out of memory]
The allocator of a GPU serves a request in one piece. The budget counts bytes, wherever they lie: so a stage can find no memory
although the account has room for it. Then everything leaves that can, free memory goes back to the device, and the stage runs
once more: that is one slow iteration, with the same results. Its inputs are kept meanwhile; without that, those that it needs
last would be gone. A stage that writes in place or draws random numbers cannot run twice. For it the pager tries beforehand
whether its memory is there in one piece (`in_one_piece`). A block that comes back and finds no memory is treated alike.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from runtime.device import MIN_MOVED_BYTES
from runtime.execution.program import Stage
from runtime.paging import UNNAMED, Block, Pager, holder_of, out_of_memory
from runtime.system import storage_swap, uninterrupted

_T = TypeVar("_T")


def run_with_room(
    attempt: Callable[[], _T], pager: Pager, read: Sequence[Block], new_bytes: int, stage: str, *, again: bool
) -> _T:
    """Return what `attempt` returns: a run of the stage that holds `read`, and `new_bytes` beside. See [Note: Out of memory].

    again: whether it may run twice. Waits for copies where it does. Raises BudgetError if there is no memory even so.
    """
    if again:
        try:
            return attempt()
        except torch.OutOfMemoryError:
            pass  # not handled here: the traceback keeps what the stage has made until this block ends
        pager.acquire_again(read, new_bytes, stage)
    try:
        return attempt()
    except torch.OutOfMemoryError as error:
        budget = pager.account.budget_bytes
        if budget is None:
            raise
        raise out_of_memory(budget, stage) from error


# -- memory


class MeasuredMemory(Protocol):
    """An allocator that counts bytes."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes that are allocated now."""

    @property
    def peak_bytes(self) -> int:
        """The highest `allocated_bytes` since the last reset."""

    def reset_peak(self) -> None:
        """Forget the peak so far."""


_NOTHING = contextlib.nullcontext()


@dataclass(slots=True, eq=False)
class WorkspaceMeter:
    """Measures each distinct stage when it runs under management. The largest measurement counts.

    memory: the allocator of the stages; None if it cannot be asked, then the estimates stay. It does not see what libraries
    allocate by themselves. runs: number of runs that are measured for each stage, where asking takes long; None for all.
    first_is_special: the first run is not measured: kernels are tuned in it, and libraries set up. The peak is not reset before
    it, since Inductor takes the peak for memory that it may use while it tunes.
    iteration: returns which iteration runs. With `runs`, a stage is measured in one run of each iteration, since the stages of
    like layers are one, and all their runs in the first iteration would meet the same circumstances. By default each run counts.
    moves: counts the blocks that came to the device or left it. They do so in other threads while a stage runs, and the
    allocator counts their bytes too: such a run measures nothing.
    """

    memory: MeasuredMemory | None
    _: KW_ONLY
    runs: int | None = None
    first_is_special: bool = False
    iteration: Callable[[], object] = object
    moves: Callable[[], int] = int
    _counts: Counter[Hashable] = field(init=False, default_factory=Counter)
    _tried_in: dict[Hashable, object] = field(init=False, default_factory=dict)
    _measured: dict[Hashable, int] = field(init=False, default_factory=dict)

    def workspace_bytes(self, stage: Stage) -> int:
        """Return the bytes beyond inputs and outputs: measured, or estimated if the stage has not run yet."""
        return self._measured.get(stage.code, stage.workspace_bytes)

    def watching(self, stage: Stage) -> AbstractContextManager[None]:
        """Measure the run of `stage` inside this context."""
        if self.memory is None or not self._is_due(key := stage.code):
            return _NOTHING
        if self.first_is_special and not self._counts[key]:
            self._counts[key] = 1
            return _NOTHING
        return self._measuring(self.memory, key, stage.output_bytes)

    @contextlib.contextmanager
    def _measuring(self, memory: MeasuredMemory, key: Hashable, output_bytes: int) -> Iterator[None]:
        moves = self.moves()
        memory.reset_peak()
        before = memory.allocated_bytes
        try:
            yield
        except BaseException:
            self._tried_in.pop(key, None)  # what failed is tried again
            raise
        beyond = max(0, memory.peak_bytes - before - output_bytes)
        if self.moves() != moves:
            return
        self._counts[key] += 1
        self._measured[key] = max(beyond, self._measured.get(key, 0))

    def _is_due(self, key: Hashable) -> bool:
        """Return whether this run of the stage is to be measured."""
        if self.runs is None or self._counts[key] >= self.runs:
            return self.runs is None
        iteration, before = self.iteration(), self._tried_in.get(key)
        self._tried_in[key] = iteration
        at_once = self.first_is_special and self._counts[key] == 1
        return at_once or iteration != before


# -- collectives

_NAMESPACES = frozenset(("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d_functional"))


class CollectiveClock(TorchFunctionMode):
    """Within the block, adds up the `seconds` that operators of torch.distributed take on this thread.

    What a rank waits for others is part of it. Only for devices on which such an operator returns when it is done.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(function, "namespace", None) not in _NAMESPACES:
            return function(*args, **(kwargs or {}))
        begin = time.perf_counter()
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self.seconds += time.perf_counter() - begin


# -- operators of user code


class OperatorRunner:
    """Brings what an operator reads to the device of `pager`, and makes blocks of its large results. For the training thread.

    device: where the blocks are; what operators do with tensors of other devices is not managed.
    """

    def __init__(self, pager: Pager, device: torch.device) -> None:
        self.pager = pager
        self.device = device

    def run(
        self,
        call: Callable[[], _T],
        *,
        name: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        new_bytes: int,
    ) -> _T:
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
        storage = self.pager.block_in_file(name, path=path, offset_bytes=offset_bytes, size_bytes=size_bytes)
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
        return storage.device == self.device and storage.nbytes() >= MIN_MOVED_BYTES and storage.resizable()
