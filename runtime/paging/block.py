"""A managed storage, and where it is."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from planner.schema import WaitingTier
    from runtime.device import Span
    from runtime.storage import Slot


class State(enum.Enum):
    """Where a block is. [Note: States of a block] says what each state means and what leads to the next one."""

    ON_DEVICE = enum.auto()
    OFFLOADING = enum.auto()
    OFFLOADED = enum.auto()
    PREFETCHING = enum.auto()
    UPDATING = enum.auto()
    DROPPED = enum.auto()


ON_DEVICE, OFFLOADING, OFFLOADED, PREFETCHING, UPDATING, DROPPED = State
"""For code that runs for each block: Python 3.11 takes as long to look a member up in an enum as to call a function."""


class Source(Protocol):
    """What makes blocks anew.

    seconds: for which its stage ran; None if that is not known. need_bytes: what the stage needs on the device at once.
    """

    seconds: float | None
    need_bytes: int

    @property
    def read(self) -> Sequence[Block]:
        """What it needs."""


class Block:
    """One storage under management.

    Only the pager changes a block, under its lock, and the mover that the pager calls (`address`, `slot`, `tier`).

    key: identifies the storage. No other storage gets this key until `let_go`.
    storage: returns a reference that keeps the storage alive, or None if the storage is gone or the block was forgotten.
    address: of its memory, as the mover left it; user code may give the storage other memory.
    span: the pages that can leave the device; None if the block cannot leave (too small, or not teraio's memory).
    slot, tier: where its copy is, or will be.
    copy_is_valid: the slot holds the block's present content. Always true while OFFLOADED or UPDATING.
    assumed_written: the copy was valid when user code began to run, and nothing but user code can have written the block since.
    pins: number of stages that hold the block on the device.
    version: counts writes. A copy out during which it has changed is not valid.
    updates: counts changes in the slot, which PyTorch's version counter does not see.
    source: what makes its content anew once it was dropped; None if nothing can.
    user_visible: user code may read or write the block between compiled regions.
    users_memory: its memory is what user code gave it; not from the pool that serves stages and copies in.
    next_use: position on the pager's clock at which the block is expected to be used next; orders evictions.
    uses: positions within the last iteration at which it was used; empty while unknown.
    born: number of the iteration in which it was first seen.
    trace_id: its id in the trace that the current plan was made for, -1 if none.
    held_back: the prefetch that was asked for last had to wait for room, for the block's own offload, or for user code.
    """

    __slots__ = (
        "address",
        "assumed_written",
        "born",
        "copy_is_valid",
        "held_back",
        "key",
        "kind",
        "name",
        "next_use",
        "pins",
        "size_bytes",
        "slot",
        "source",
        "span",
        "state",
        "storage",
        "tier",
        "trace_id",
        "updates",
        "user_visible",
        "users_memory",
        "uses",
        "version",
        "_weak",
    )

    def __init__(self, *, storage: torch.UntypedStorage, name: str, kind: str, user_visible: bool, span: Span | None) -> None:
        self._weak: StorageWeakRef | None = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.key = int(self._weak.cdata)
        # PyTorch keeps the object that stands for a storage in Python as long as the storage.
        self.storage: Callable[[], torch.UntypedStorage | None] = weakref.ref(storage)
        self.name = name
        self.kind = kind
        self.size_bytes = storage.nbytes()
        self.address = 0 if storage.device.type == "meta" else storage.data_ptr()  # fake tensors have no memory
        self.span = span
        self.user_visible = self.users_memory = user_visible
        self.state = ON_DEVICE
        self.slot: Slot | None = None
        self.tier: WaitingTier | None = None
        self.copy_is_valid = False
        self.assumed_written = False
        self.pins = 0
        self.next_use = 0
        self.uses: tuple[int, ...] = ()
        self.trace_id = -1
        self.held_back = False
        self.version = 0
        self.updates = 0
        self.source: Source | None = None
        self.born = 0

    def __repr__(self) -> str:
        return f"<Block {self.name} {self.kind} {self.size_bytes} bytes {self.state.name}>"

    @property
    def can_be_dropped(self) -> bool:
        """Whether its content can be made anew, and nobody misses it until then."""
        return self.source is not None and self.span is not None and not self.user_visible and not self.pins

    @property
    def dead(self) -> bool:
        """Whether nobody holds the storage any more, or the block was forgotten."""
        return self.storage() is None

    def let_go(self) -> None:
        """The block was forgotten: stop watching its storage.

        A weak reference keeps a small piece of a dead storage on the heap. Records of iterations hold blocks for long. So many
        such pieces would keep the heap from using the memory between them again.
        """
        self._weak = self.source = None
        self.storage = _gone


def _gone() -> None:
    """There is no storage any more."""
