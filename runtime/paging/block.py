"""Storages under management: what is known of each, which tensors share it, and which mover may move it."""

from __future__ import annotations

import enum
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from runtime.storage import map_slot
from runtime.system import all_objects

if TYPE_CHECKING:
    from planner.schema import WaitingTier
    from runtime.device import Span
    from runtime.storage import Slot, Store

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))  # the types of tensors that wrap no other one
UNNAMED = "made before it is in a graph"  # until a graph or an optimizer takes the block, and names it
# References to the storage of a tensor without aliases: the tensor's and that of the storage's object in Python.
_OWN_REFERENCES = 2


class State(enum.Enum):
    """Where a block is. [Note: States of a block] says what each state means and what leads to the next one."""

    ON_DEVICE = enum.auto()
    OFFLOADING = enum.auto()
    OFFLOADED = enum.auto()
    PREFETCHING = enum.auto()
    UPDATING = enum.auto()
    DROPPED = enum.auto()


# For code that runs for each block: Python 3.11 takes as long to look a member up in an enum as to call a function.
ON_DEVICE, OFFLOADING, OFFLOADED, PREFETCHING, UPDATING, DROPPED = State


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class Block:
    """One storage under management.

    Only the pager changes a block, under its lock, and the mover that the pager calls (`address`, `slot`, `tier`). `trace_id` is
    for who follows a plan, in the training thread.

    key: identifies the storage. No other storage gets this key until `let_go`.
    held, at: the storage, and where its memory is, which PyTorch does not tell if it has none; default: as the storage says.
    storage: returns a reference that keeps the storage alive, or None if the storage is gone or the block was forgotten.
    address: of its memory, as the mover left it; user code may give the storage other memory.
    span: the pages that can leave the device; None if the block cannot leave (too small, or not teraio's memory).
    slot, tier: where its copy is, or will be.
    copy_is_valid: the slot holds the block's present content. Always true while OFFLOADED or UPDATING.
    assumed_written: the copy was valid when user code began to run, and nothing but user code can have written the block since.
    pins: number of stages that hold the block on the device.
    version: counts writes. A copy out during which it has changed is not valid.
    updates: counts changes in the slot, which PyTorch's version counter does not see.
    source: what makes its content anew once it was dropped; None if nothing can. The pager only asks whether there is one.
    user_visible: user code may read or write the block between compiled regions.
    next_use: position on the pager's clock at which the block is expected to be used next; orders evictions.
    uses: positions within the last iteration at which it was used; empty while unknown.
    born: number of the iteration in which it was first seen.
    trace_id: its id in the trace that the current plan was made for, -1 if none.
    held_back: the prefetch that was asked for last had to wait for room, for the block's own offload, or for user code.
    """

    held: InitVar[torch.UntypedStorage]
    at: InitVar[int | None] = None
    name: str
    kind: str
    user_visible: bool
    span: Span | None
    key: int = field(init=False)
    size_bytes: int = field(init=False)
    address: int = field(init=False)
    storage: Callable[[], torch.UntypedStorage | None] = field(init=False)
    _weak: StorageWeakRef | None = field(init=False)
    state: State = ON_DEVICE
    slot: Slot | None = None
    tier: WaitingTier | None = None
    copy_is_valid: bool = False
    assumed_written: bool = False
    pins: int = 0
    version: int = 0
    updates: int = 0
    source: object = None
    next_use: int = 0
    uses: tuple[int, ...] = ()
    born: int = 0
    trace_id: int = -1
    held_back: bool = False

    def __post_init__(self, held: torch.UntypedStorage, at: int | None) -> None:
        self._weak = StorageWeakRef(held)  # type: ignore[no-untyped-call]
        self.key = int(self._weak.cdata)
        # PyTorch keeps the object that stands for a storage in Python as long as the storage.
        self.storage = weakref.ref(held)
        self.size_bytes = held.nbytes()
        if at is None:
            at = 0 if held.device.type == "meta" else held.data_ptr()  # fake tensors have no memory
        self.address = at

    def __repr__(self) -> str:
        return f"<Block {self.name} {self.kind} {self.size_bytes} bytes {self.state.name}>"

    @property
    def can_be_dropped(self) -> bool:
        """Whether its content can be recomputed, and nobody misses it until then."""
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


# -- tensors and their storages


def holder_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in whose storage the data of `tensor` are: of a DTensor its local part, of others `tensor` itself.

    The result of a collective that still runs is waited for: nobody may move or free what the collective works on.
    """
    while type(tensor) not in PLAIN:
        wait = getattr(tensor, "trigger_wait", None)
        inner: Any = wait() if wait is not None else getattr(tensor, "_local_tensor", None)
        if not isinstance(inner, torch.Tensor):
            break
        tensor = inner
    return tensor


def given_away(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return those of the strided `tensors` whose memory was given away by DLPack and is still held.

    Whoever has the memory by DLPack holds a tensor that needs no gradient, by a reference that no object of Python accounts for.
    Frozen tensors are held in this way too by autograd while a backward pass of eager code is due, and by TorchScript; they
    then stay without need. Addresses (`data_ptr`) leave no trace.

    Never waits. Looks at all objects of Python if a tensor has aliases.
    """
    aliased = {key for tensor in tensors if torch._C._storage_Use_Count(key := _key(tensor)) > _OWN_REFERENCES}
    aliases = [each for each in _all_tensors() if _key(each) in aliased] if aliased else []
    views = Counter(id(each._base) for each in aliases if each._is_view())
    # Its object in Python has one of the references to a tensor.
    frozen = [each for each in (*tensors, *aliases) if not each.requires_grad]
    given = {_key(each) for each in frozen if each._use_count() > 1 + views[id(each)]}  # type: ignore[attr-defined]
    return [tensor for tensor in tensors if _key(tensor) in given]


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _all_tensors() -> Iterable[torch.Tensor]:
    """All tensors with memory of their own that have an object in Python."""
    for each in all_objects(torch.Tensor):
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.layout is torch.strided:
            if not torch._C._functorch.is_functorch_wrapped_tensor(each):
                yield each


# -- which mover carries a storage: one at most, since a second one would change its memory without the first knowing

# The owner and the storage. A dead storage's key may go to another one: then nobody owns that yet.
_Claim = tuple[weakref.ref[object], weakref.ref[torch.UntypedStorage]]


class LeftBehind(NamedTuple):
    """Where a run that has ended has left the content of a storage. release: of the slot; not `alive` if the storage is gone.

    lead_bytes: where it begins in the slot.
    """

    release: weakref.finalize[..., torch.UntypedStorage]
    store: Store
    slot: Slot
    lead_bytes: int


class StorageOwnership:
    """Records which mover owns which storage. All movers that can meet the same storages must share one object.

    If several training runs use a storage, the first mover to claim it moves it. For the others it does not move. Holds no
    owner and no storage alive. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: dict[int, _Claim] = {}  # by block key
        self._left: dict[int, LeftBehind] = {}  # likewise; of dead storages until another one gets the key

    def claim(self, storage: torch.UntypedStorage, owner: object) -> bool:
        """Make `owner` the owner of the storage if there is none. Return whether `owner` owns it now."""
        with self._lock:
            known = self._claims.get(storage._cdata)
            if known is None or known[1]() is not storage or (owns := known[0]()) is None:
                self._claims[storage._cdata] = _claim(storage, owner)
                return True
            return owns is owner

    def leave(self, storage: torch.UntypedStorage) -> None:
        """Let no mover own the storage, as long as this object lives: others hold its memory."""
        with self._lock:
            self._claims[storage._cdata] = _claim(storage, self)

    def stays(self, storage: torch.UntypedStorage) -> bool:
        """Whether no mover may own the storage."""
        with self._lock:
            known = self._claims.get(storage._cdata)
            return known is not None and known[0]() is self and known[1]() is storage

    def forget_stays(self) -> None:
        """End `leave`: others may have let go of the memory."""
        self.give_up_all(self)

    # -- what runs that have ended have left in their tiers

    def leave_behind(self, storage: torch.UntypedStorage, store: Store, slot: Slot, lead_bytes: int) -> None:
        """The content stays in a slot, from `lead_bytes` on, until the storage dies or `taken` is called: that releases the slot.

        A file of the user that the slot is in stays open as long.
        """
        release = weakref.finalize(storage, store.keep(slot))
        release.atexit = False
        with self._lock:
            self._left[storage._cdata] = LeftBehind(release, store, slot, lead_bytes)

    def left_behind(self, storage: torch.UntypedStorage) -> LeftBehind | None:
        """Return where the content of the storage was left; None if it was not left anywhere."""
        left = self._left.get(storage._cdata) if self._left else None
        return left if left is not None and left.release.alive else None

    def map_left(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """Return main memory over what was left of a storage, see `Tiers.map`; None if nothing was."""
        left = self.left_behind(storage)
        with self._lock:
            return None if left is None else map_slot(left.store, left.slot, left.lead_bytes, storage.nbytes())

    def taken(self, storage: torch.UntypedStorage) -> None:
        """The content is elsewhere now: release its slot."""
        with self._lock:
            left = self._left.pop(storage._cdata, None)
        if left is not None:
            left.release()

    def give_up(self, key: int, owner: object) -> None:
        """End the ownership of `owner` over the storage with this key, if there is one."""
        with self._lock:
            known = self._claims.get(key)
            if known is not None and known[0]() is owner:
                del self._claims[key]

    def give_up_all(self, owner: object) -> None:
        """End every ownership of `owner`, and of owners that no longer exist."""
        with self._lock:
            for key in [key for key, each in self._claims.items() if each[0]() in (owner, None)]:
                del self._claims[key]


def _claim(storage: torch.UntypedStorage, owner: object) -> _Claim:
    return weakref.ref(owner), weakref.ref(storage)
