"""Which parameters several ranks hold, and so must update by the same arithmetic.

[Note: Several ranks]
Ranks that hold the same parameter must change it by the same arithmetic: a difference in the last bit grows from step to step.
What each rank decides for itself, from its own times and its own memory, may change when things happen, never how they round.
So no update runs on the host's processor, which rounds differently, and none before gradients were reduced. Two kinds of
parameters are free to: those of the optimizer inside a `ZeroRedundancyOptimizer`, which other ranks get by a broadcast, and
DTensors that are sharded over all ranks, of whose elements no other rank has a copy.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def rank_count() -> int:
    """Return how many ranks train together: the size of PyTorch's default process group, 1 if there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_sharded_over_all(tensor: Tensor) -> bool:
    """Return whether each element of `tensor` is in one rank only: a DTensor over all ranks, replicated over none of its axes."""
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", ())
    if mesh is None or mesh.size() != rank_count():
        return False
    return not any(each.is_replicate() or each.is_partial() for axis, each in enumerate(placements) if mesh.size(axis) > 1)
