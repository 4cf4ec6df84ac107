"""Which mover carries a storage: one storage can have one only.

A second one would give it other memory behind the first one's back. Where several runtimes use a storage, it stays put
for all but the first.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True, slots=True)
class _Claim:
    """storage: while it is held, no other storage gets the key, also if the owner never gives up what is gone."""

    storage: StorageWeakRef
    owner: weakref.ref[object]


_lock = threading.Lock()
_claims: dict[int, _Claim] = {}
"""By block key."""


def claim(storage: torch.UntypedStorage, owner: object) -> bool:
    """Whether `owner` carries the storage; from now on it does if nobody else did."""
    with _lock:
        known = _claims.get(storage._cdata)
        if known is None or known.owner() is None:
            known = _claims[storage._cdata] = _Claim(StorageWeakRef(storage), weakref.ref(owner))  # type: ignore[no-untyped-call]
        return known.owner() is owner


def give_up(key: int, owner: object) -> None:
    """`owner` does not carry the storage with this key any more."""
    with _lock:
        if key in _claims and _claims[key].owner() is owner:
            del _claims[key]


def give_up_all(owner: object) -> None:
    """`owner` carries nothing any more; nor do those that are gone."""
    with _lock:
        for key in [key for key, each in _claims.items() if each.owner() in (owner, None)]:
            del _claims[key]
