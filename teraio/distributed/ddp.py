"""Data parallelism: which parameters several ranks hold, and what `DistributedDataParallel` does with their gradients.

[Note: Several ranks]
Ranks that hold the same parameter must change it by the same arithmetic: a difference in the last bit grows from step to step.
What each rank decides for itself, from its own times and its own memory, may change when things happen, never how they round.
So no update runs on the host's processor, which rounds differently, and none before gradients were reduced. Two kinds of
parameters are free to: those of the optimizer inside a `ZeroRedundancyOptimizer`, which other ranks get by a broadcast, and
DTensors that are sharded over all ranks, of whose elements no other rank has a copy.

[Note: Buckets]
DistributedDataParallel copies gradients to buckets, which the ranks reduce, and copies the results back to `.grad`. With
`gradient_as_bucket_view`, `.grad` is a view of the bucket. Buckets are its own: it writes to them when it wants. They count
against the budget, and never move; gradients in them are no blocks. All other gradients are blocks as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from runtime.system import all_objects
from teraio.distributed.private_names import DDP, refuse_hidden_states
from teraio.distributed.zero import refuse_overlapping


class GradientBuckets:
    """Knows the parameters of all `DistributedDataParallel` modules of this process. Keeps none of them alive.

    size_bytes: of all buckets that were there at the last `look`.
    """

    def __init__(self) -> None:
        self._parameters: Any = WeakTensorKeyDictionary()  # whether the gradient is a view of a bucket
        self.size_bytes = 0

    def have(self, parameter: Tensor) -> bool:
        """Return whether the parameter's gradient passes through a bucket."""
        return self._find(parameter) is not None

    def hold(self, parameter: Tensor) -> bool:
        """Return whether the parameter's gradient is a view of a bucket."""
        return bool(self._find(parameter))

    def _find(self, parameter: Tensor) -> bool | None:
        found: bool | None = self._parameters.get(parameter)
        return found

    def look(self) -> None:
        """Look for buckets. If there is a process group, collects garbage and looks at all objects of Python, which takes a tenth
        of a second or so. Modules of earlier trainings that are garbage would count, and hold the memory of their buckets.

        Raises UnsupportedError if an optimizer updates parameters while gradients are reduced, or if a library is that of a torch
        that is not known.
        """
        self.size_bytes = 0
        if not dist.is_available() or not dist.is_initialized():
            return
        objects = all_objects(collected=True)
        for each in objects:  # nobody has to call its step, so nothing else would show it
            refuse_overlapping(each)
        refuse_hidden_states(objects)
        for module in _modules(objects):
            DDP.require(module)
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            for parameter in trained:
                self._parameters[parameter] = module.gradient_as_bucket_view
            self.size_bytes += sum(parameter.nbytes for parameter in trained)


def _modules(objects: Iterable[Any]) -> Iterator[DistributedDataParallel]:
    """PyTorch has no list of them."""
    return (each for each in objects if issubclass(type(each), DistributedDataParallel))


def rank_count() -> int:
    """Return how many ranks train together: the size of PyTorch's default process group, 1 if there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_sharded_over_all(tensor: Tensor) -> bool:
    """Return whether each element of `tensor` is in one rank only: a DTensor over all ranks, replicated over none of its axes."""
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", ())
    if mesh is None or mesh.size() != rank_count():
        return False
    return not any(each.is_replicate() or each.is_partial() for axis, each in enumerate(placements) if mesh.size(axis) > 1)
