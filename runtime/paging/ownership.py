"""Which mover carries a storage: one at most, since a second one would change its memory without the first knowing."""

from __future__ import annotations

import threading
import weakref

import torch

_Claim = tuple[weakref.ref[object], weakref.ref[torch.UntypedStorage]]
"""The owner and the storage. A dead storage's key may go to another one: then nobody owns that yet."""


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
