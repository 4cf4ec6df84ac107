"""The memory of a DTensor is that of its local tensor, and what a collective still writes is waited for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from runtime.paging import Pager, holder_of


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """Two ranks, of which the other one does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def shard(local: torch.Tensor) -> DTensor:
    return DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)])


def test_of_plain_tensors_it_is_the_tensor() -> None:
    for plain in (torch.ones(2), torch.nn.Parameter(torch.ones(2))):
        assert holder_of(plain) is plain


def test_of_a_sharded_parameter_it_is_the_local_tensor() -> None:
    local = torch.ones(3, 4)
    parameter = torch.nn.Parameter(shard(local))
    assert holder_of(parameter).untyped_storage()._cdata == local.untyped_storage()._cdata


def test_the_result_of_a_collective_is_waited_for() -> None:
    running = AsyncCollectiveTensor(torch.ones(3, 4))
    assert not running.completed
    assert holder_of(running) is running.elem
    assert running.completed


def test_a_sharded_parameter_and_its_local_tensor_are_one_block() -> None:
    local = torch.ones(3, 4)
    pager = Pager(mover=None, budget_bytes=None)
    block = pager.block_of(shard(local), name="weight", kind="parameter", user_visible=True)
    assert block.size_bytes == local.nbytes
    assert pager.known_block(local) is block


def test_values_are_looked_up_together_and_may_be_anything() -> None:
    local, other = torch.ones(3, 4), torch.ones(2)
    pager = Pager(mover=None, budget_bytes=None)
    block = pager.block_of(local, name="weight", kind="parameter", user_visible=True)
    values = [shard(local), 3, None, other, other.to_sparse(), local[1]]
    assert pager.known_blocks(values) == [block, None, None, None, None, block]
