"""A managed storage and where it is."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from planner.schema import WaitingTier
    from runtime.device import Span
    from runtime.storage import Slot


class State(enum.Enum):
    """ON_DEVICE and OFFLOADED are at rest. OFFLOADING still holds its memory; PREFETCHING has its memory reserved.

    UPDATING: away, and its slot is lent to who changes it there, see `Lending`.
    """

    ON_DEVICE = enum.auto()
    OFFLOADING = enum.auto()
    OFFLOADED = enum.auto()
    PREFETCHING = enum.auto()
    UPDATING = enum.auto()


class Block:
    """One storage under management. Changed by the pager only, under its lock.

    address: of its memory, as the mover left it; user code may give the storage other memory.
    span: the pages that can leave, None if the block can not (too small, foreign memory).
    slot, tier: where its copy is, or will be.
    copy_is_valid: the slot holds the block's present content (always so while OFFLOADED or UPDATING).
    version: counts writes, so that a copy out that was overtaken by a write is not taken for valid.
    user_visible: user code may read or write it between compiled regions.
    next_use: position on the pager's clock at which it is expected to be used next; orders evictions.
    uses: positions within the iteration at which it was used the last time round; empty while unknown.
    born: number of the iteration in which it was first seen.
    trace_id: its id in the trace that the current plan was made for, -1 if none.
    held_back: the copy in that was asked for last had to wait for room, its own copy out or the end of user code.
    """

    __slots__ = (
        "address",
        "born",
        "copy_is_valid",
        "held_back",
        "kind",
        "name",
        "next_use",
        "pins",
        "size_bytes",
        "slot",
        "span",
        "state",
        "tier",
        "trace_id",
        "user_visible",
        "uses",
        "version",
        "weak",
    )

    def __init__(self, *, storage: torch.UntypedStorage, name: str, kind: str, user_visible: bool, span: Span | None) -> None:
        self.weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.name = name
        self.kind = kind
        self.size_bytes = storage.nbytes()
        self.address = storage.data_ptr()
        self.span = span
        self.user_visible = user_visible
        self.state = State.ON_DEVICE
        self.slot: Slot | None = None
        self.tier: WaitingTier | None = None
        self.copy_is_valid = False
        self.pins = 0
        self.next_use = 0
        self.uses: tuple[int, ...] = ()
        self.trace_id = -1
        self.held_back = False
        self.version = 0
        self.born = 0

    def __repr__(self) -> str:
        return f"<Block {self.name} {self.kind} {self.size_bytes} bytes {self.state.name}>"

    @property
    def key(self) -> int:
        """Identifies the storage; not given to another one as long as the block exists."""
        return int(self.weak.cdata)

    @property
    def dead(self) -> bool:
        """True once nobody holds the storage any more."""
        return bool(self.weak.expired())  # type: ignore[no-untyped-call]

    def storage(self) -> torch.UntypedStorage | None:
        """A reference that keeps the storage alive, or None if it is gone."""
        return torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)
