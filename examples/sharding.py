"""FSDP2 and ZeRO-1 over the ranks that torchrun starts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from examples.llama import Llama


@contextmanager
def ranks(device: str) -> Iterator[int]:
    """Within, this process is one rank of those that torchrun has started. Gives its number. Raises KeyError without torchrun."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def shard(model: nn.Module, device: str) -> None:
    """Shard the parameters over all ranks: each layer, or all at once for another model, and then the rest."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model.layers if isinstance(model, Llama) else ():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def with_zero(model: nn.Module, kind: type[Optimizer], settings: dict[str, Any]) -> tuple[nn.Module, Optimizer]:
    """Return the model with gradients reduced over all ranks, and an optimizer with its states divided over them (ZeRO-1)."""
    return DistributedDataParallel(model), ZeroRedundancyOptimizer(model.parameters(), kind, **settings)
