"""Which tensor has the memory of one that only wraps another, such as a DTensor."""

from __future__ import annotations

from typing import Any

import torch

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
"""The types of tensors that wrap no other one."""


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
