"""How many ranks train together, and which optimizer of a rank does the work.

[Note: Several ranks]
Ranks that hold the same parameter must change it by the same arithmetic: a difference in the last bit grows from step to step.
What each rank decides for itself, from its own times and its own memory, may change when things happen, never how they round.
So no update runs on the host's processor, which rounds differently, and none before gradients were reduced. The optimizer inside
a `ZeroRedundancyOptimizer` is free to: other ranks get its parameters by a broadcast.
"""

from __future__ import annotations

import sys

import torch.distributed as dist
from torch.optim import Optimizer


def rank_count() -> int:
    """Return how many ranks train together: the size of PyTorch's default process group, 1 if there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def optimizer_inside(optimizer: Optimizer) -> Optimizer | None:
    """Return the optimizer that a `ZeroRedundancyOptimizer` has inside, over the parameters of this rank; None for others."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is None or not isinstance(optimizer, module.ZeroRedundancyOptimizer):
        return None
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, Optimizer) else None
