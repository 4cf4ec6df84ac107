"""DistributedDataParallel in a group of one process: PyTorch splits the graph by buckets of gradients, and compiles each part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import teraio

from ...training import MIB, Chain, compiled, forget, require, unequal

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed"),
    pytest.mark.filterwarnings("ignore:.*will be ignored.*:UserWarning"),
]


@pytest.fixture(autouse=True)
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    forget()
    dist.destroy_process_group()


def trained(tmp_path: Path, *, budget: int | None, managed: bool = True, steps: int = 4) -> list[Tensor]:
    """Losses and final parameters."""
    forget()
    torch.manual_seed(0)
    module = Chain()
    parallel = DistributedDataParallel(module, bucket_cap_mb=2)
    options = {"memory_budget": budget, "storage": str(tmp_path)}
    model = compiled(parallel, options) if managed else parallel
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 512)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    if managed:
        (status,) = teraio.status()
        require(status.stages >= 4, "the graph was not split by buckets")
        require(bool(status.moved_bytes["storage->device"]) == (budget is not None), str(status.moved_bytes))
    return [*losses, *(p.detach().clone() for p in module.parameters())]


def test_several_buckets_train_with_the_same_bits(tmp_path: Path) -> None:
    plain = trained(tmp_path, budget=None, managed=False)
    unbudgeted = trained(tmp_path, budget=None)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(unbudgeted, plain, strict=True))
    assert not unequal(trained(tmp_path, budget=16 * MIB), unbudgeted)
