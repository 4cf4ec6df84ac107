"""Data parallelism: DistributedDataParallel's gradients, and what `ZeroRedundancyOptimizer` has updated, as stages.

[Note: Several ranks]
Ranks that hold the same parameter must change it by the same arithmetic: a difference in the last bit grows from step to step.
What each rank decides for itself, from its own times and its own memory, may change when things happen, never how they round.
So no update runs on the host's processor, which rounds differently, and none before gradients were reduced. Two kinds of
parameters are free to: those of the optimizer inside a `ZeroRedundancyOptimizer`, which other ranks get by a broadcast, and
DTensors that are sharded over all ranks, of whose elements no other rank has a copy.

[Note: Buckets]
DistributedDataParallel writes to its buckets when it wants. They count against the budget and never move; gradients in them are
no blocks. See `docs/distributed.md`.

[Note: Broadcasts of updates] At the end of the step of a `ZeroRedundancyOptimizer`, each rank sends the parameters that it has
updated, and receives all others. Here that is a region of stages, each for a share of the parameters: they come to the device
first, and stay until they have been sent or received. `docs/distributed.md` says why they begin after all updates.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from planner.errors import UnsupportedError
from runtime.paging import Block
from runtime.system import all_objects
from teraio.distributed.library_calls import LibraryCalls
from teraio.distributed.private_names import DDP, ZERO, refuse_hidden_states


class GradientBuckets:
    """Knows the parameters of all `DistributedDataParallel` modules of this process. Keeps none of them alive.

    size_bytes: of all buckets that were there at the last `look`.
    """

    def __init__(self) -> None:
        self._parameters: Any = WeakTensorKeyDictionary()  # whether the gradient is a view of a bucket
        self.size_bytes = 0

    def have(self, parameter: Tensor) -> bool:
        """Return whether the parameter's gradient passes through a bucket."""
        return parameter in self._parameters

    def hold(self, parameter: Tensor) -> bool:
        """Return whether the parameter's gradient is a view of a bucket."""
        return bool(self._parameters.get(parameter))

    def look(self) -> None:
        """Look for buckets. If there is a process group, collects garbage and looks at all objects of Python, see `all_objects`.

        Raises UnsupportedError if an optimizer updates parameters while gradients are reduced, or if a library is that of a torch
        that is not known.
        """
        self.size_bytes = 0
        if not dist.is_available() or not dist.is_initialized():
            return
        objects = all_objects(Module, Optimizer, collected=True)  # modules of earlier trainings that are garbage would count, too
        for each in objects:  # nobody has to call its step, so nothing else would show it
            refuse_overlapping(each)
        refuse_hidden_states(objects)
        # PyTorch has no list of them.
        for module in (each for each in objects if issubclass(type(each), DistributedDataParallel)):
            DDP.require(module)
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            for parameter in trained:
                self._parameters[parameter] = module.gradient_as_bucket_view
            self.size_bytes += sum(parameter.nbytes for parameter in trained)


def rank_count() -> int:
    """Return how many ranks train together: the size of PyTorch's default process group, 1 if there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_sharded_over_all(tensor: Tensor) -> bool:
    """Return whether each element of `tensor` is in one rank only: a DTensor over all ranks, replicated over none of its axes."""
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", ())
    if mesh is None or mesh.size() != rank_count():
        return False
    return not any(each.is_replicate() or each.is_partial() for axis, each in enumerate(placements) if mesh.size(axis) > 1)


_SHARES = 32  # into how many stages the parameters are divided, about. What one of them has is on the device at once.


def refuse_overlapping(optimizer: object) -> None:
    """Raise UnsupportedError for a `ZeroRedundancyOptimizer` that updates inside DistributedDataParallel's communication.

    Also for one of a torch that is not known.
    """
    if not _is_zero(optimizer):
        return
    if getattr(optimizer, "_overlap_with_ddp", False):  # it may have no optimizer inside yet
        raise UnsupportedError(
            "found a ZeroRedundancyOptimizer with overlap_with_ddp=True, whose updates run while gradients are reduced, where "
            "teraio cannot bring states to the device; leave out overlap_with_ddp, and call its step() after backward"
        )
    ZERO.require(optimizer)


def optimizer_inside(optimizer: Optimizer) -> Optimizer | None:
    """Return the optimizer that a `ZeroRedundancyOptimizer` has inside, over the parameters of this rank; None for others."""
    inner = getattr(optimizer, "optim", None) if _is_zero(optimizer) else None
    return inner if isinstance(inner, Optimizer) else None


def broadcast_in_stages(calls: LibraryCalls, optimizer: Any) -> None:
    """Make stages of the broadcasts of this `ZeroRedundancyOptimizer`, from the next one on. Twice does no harm.

    Not of one with `parameters_as_bucket_view`, which sends whole buckets: they are PyTorch's, and do not move.
    """
    if not optimizer.parameters_as_bucket_view:
        calls.replace(optimizer, "_sync_params", _sync_params)


def _sync_params(calls: LibraryCalls, optimizer: Any) -> None:
    shares = _shares(optimizer) if calls.active() else []
    blocks = [[b for each in share if (b := calls.pager.known_block(each)) is not None] for _, share in shares]
    if not any(blocks):
        type(optimizer)._sync_params(optimizer)
        return
    with calls.region(("broadcast", id(optimizer)), len(shares), step_goes_on=True):
        for number, ((rank, share), own) in enumerate(zip(shares, blocks, strict=True)):

            def broadcast(rank: int = rank, share: Sequence[Tensor] = share) -> Sequence[Block]:
                source = dist.get_global_rank(optimizer.process_group, rank)
                work = [dist.broadcast(each.data, source, optimizer.process_group, async_op=True) for each in share]
                for each in work:
                    each.wait()
                return ()

            calls.observer.run_stage(
                f"forward/updated.{number}",
                broadcast,
                phase="forward",
                read=list(dict.fromkeys(own)),
                written=own if rank != optimizer.rank else (),
                collective=True,
            )


def _shares(optimizer: Any) -> list[tuple[int, list[Tensor]]]:
    """Return all parameters in PyTorch's order, cut into shares of one rank each."""
    owned = [
        (rank, parameter)
        for rank, groups in enumerate(optimizer._partition_parameters())
        for group in groups
        for parameter in group["params"]
    ]
    most = sum(parameter.nbytes for _, parameter in owned) // _SHARES
    shares: list[tuple[int, list[Tensor]]] = []
    size = 0
    for rank, parameter in owned:
        if not shares or shares[-1][0] != rank or size + parameter.nbytes > most:
            shares.append((rank, []))
            size = 0
        shares[-1][1].append(parameter)
        size += parameter.nbytes
    return shares


def _is_zero(thing: object) -> bool:
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and issubclass(type(thing), module.ZeroRedundancyOptimizer)
