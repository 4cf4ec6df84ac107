"""Whose memory a tensor has: given away to code outside of PyTorch, owned by one mover, or that of a local tensor."""

from __future__ import annotations

import gc

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from runtime.paging import Pager, StorageOwnership, holder_of


class Owner:
    """Stands for a mover."""


def test_a_storage_has_one_owner_until_that_one_is_gone_and_none_if_it_is_left() -> None:
    ownership, first, second = StorageOwnership(), Owner(), Owner()
    owned, left = torch.zeros(8).untyped_storage(), torch.zeros(8).untyped_storage()
    assert ownership.claim(owned, first) and ownership.claim(owned, first) and not ownership.claim(owned, second)
    ownership.leave(left)
    assert ownership.stays(left) and not ownership.claim(left, first) and not ownership.stays(owned)
    del first
    gc.collect()
    assert ownership.claim(owned, second)


def test_a_storage_that_gets_the_key_of_a_dead_one_is_nobodys_yet() -> None:
    claims, first, second = StorageOwnership(), Owner(), Owner()
    for give in (lambda storage: claims.claim(storage, first), claims.leave):
        storage = torch.zeros(8).untyped_storage()
        give(storage)
        key = storage._cdata
        del storage
        others = [torch.zeros(8).untyped_storage()]
        while (same := others[-1])._cdata != key and len(others) < 10_000:
            others.append(torch.zeros(8).untyped_storage())
        assert same._cdata == key
        assert not claims.stays(same) and claims.claim(same, second) and not claims.claim(same, first)


# -- sharded tensors


def shard(local: torch.Tensor) -> DTensor:
    return DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)])


def test_a_sharded_parameter_has_the_memory_of_its_local_tensor_and_is_one_block_with_it(group: None) -> None:
    local = torch.ones(3, 4)
    for plain in (local, torch.nn.Parameter(local)):
        assert holder_of(plain) is plain
    assert holder_of(torch.nn.Parameter(shard(local))).untyped_storage()._cdata == local.untyped_storage()._cdata
    pager = Pager(mover=None, budget_bytes=None)
    block = pager.block_of(shard(local), name="weight", kind="parameter", user_visible=True)
    assert block.size_bytes == local.nbytes
    values = [shard(local), 3, None, other := torch.ones(2), other.to_sparse(), local[1]]
    assert pager.known_blocks(values) == [block, None, None, None, None, block] and pager.known_block(local) is block


def test_the_result_of_a_collective_is_waited_for(group: None) -> None:
    running = AsyncCollectiveTensor(torch.ones(3, 4))
    assert not running.completed
    assert holder_of(running) is running.elem
    assert running.completed
