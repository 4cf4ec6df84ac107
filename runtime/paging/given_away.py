"""Finds tensors whose memory code outside of PyTorch may hold."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import cast

import torch

from runtime.system import thawed

_OWN_REFERENCES = 2
"""References to the storage of a tensor without aliases: the tensor's and that of the storage's object in Python."""


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
    given = {_key(each) for each in (*tensors, *aliases) if not each.requires_grad and _use_count(each) > 1 + views[id(each)]}
    return [tensor for tensor in tensors if _key(tensor) in given]


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _use_count(tensor: torch.Tensor) -> int:
    """Return the number of references to the tensor, of which its object in Python has one."""
    return cast(int, tensor._use_count())  # type: ignore[attr-defined]


def _all_tensors() -> Iterable[torch.Tensor]:
    """All tensors with memory of their own that have an object in Python."""
    with thawed():
        objects = gc.get_objects()
    for each in objects:
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.layout is torch.strided:
            if not torch._C._functorch.is_functorch_wrapped_tensor(each):
                yield each
