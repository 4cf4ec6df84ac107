"""Which mover carries a storage: one at most, since a second one would change its memory without the first knowing."""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class _Claim(NamedTuple):
    """storage: while this reference is held, no other storage gets the key, even if the owner never gives up a dead storage."""

    storage: StorageWeakRef
    owner: weakref.ref[object]


class StorageOwnership:
    """Records which mover owns which storage. All movers that can meet the same storages must share one object.

    If several training runs use a storage, the first mover to claim it moves it. For the others it does not move. Holds no
    owner and no storage alive. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: dict[int, _Claim] = {}  # by block key

    def claim(self, storage: torch.UntypedStorage, owner: object) -> bool:
        """Make `owner` the owner of the storage if there is none. Return whether `owner` owns it now."""
        with self._lock:
            known = self._claims.get(storage._cdata)
            if known is None or known.owner() is None:
                known = _Claim(StorageWeakRef(storage), weakref.ref(owner))  # type: ignore[no-untyped-call]
                self._claims[storage._cdata] = known
            return known.owner() is owner

    def leave(self, storage: torch.UntypedStorage) -> None:
        """Let no mover own the storage, as long as this object lives: others hold its memory."""
        with self._lock:
            self._claims[storage._cdata] = _Claim(StorageWeakRef(storage), weakref.ref(self))  # type: ignore[no-untyped-call]

    def stays(self, storage: torch.UntypedStorage) -> bool:
        """Whether no mover may own the storage."""
        with self._lock:
            known = self._claims.get(storage._cdata)
            return known is not None and known.owner() is self

    def give_up(self, key: int, owner: object) -> None:
        """End the ownership of `owner` over the storage with this key, if there is one."""
        with self._lock:
            if key in self._claims and self._claims[key].owner() is owner:
                del self._claims[key]

    def give_up_all(self, owner: object) -> None:
        """End every ownership of `owner`, and of owners that no longer exist."""
        with self._lock:
            for key in [key for key, each in self._claims.items() if each.owner() in (owner, None)]:
                del self._claims[key]
