"""Which mover carries a storage: one at most, since a second one would change its memory without the first knowing."""

from __future__ import annotations

import threading
import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_Claim = tuple[weakref.ref[object], StorageWeakRef]
"""The owner, and what keeps any other storage from getting the key, even if the owner never gives up a dead storage."""


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
            if known is None or known[0]() is None:
                self._claims[storage._cdata] = known = _claim(storage, owner)
            return known[0]() is owner

    def leave(self, storage: torch.UntypedStorage) -> None:
        """Let no mover own the storage, as long as this object lives: others hold its memory."""
        with self._lock:
            self._claims[storage._cdata] = _claim(storage, self)

    def stays(self, storage: torch.UntypedStorage) -> bool:
        """Whether no mover may own the storage."""
        with self._lock:
            known = self._claims.get(storage._cdata)
            return known is not None and known[0]() is self

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
    return weakref.ref(owner), StorageWeakRef(storage)  # type: ignore[no-untyped-call]
