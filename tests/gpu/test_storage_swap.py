"""Storages of a GPU get other memory: kernels use it, and nothing is lost or leaks."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator

import pytest
import torch

from runtime.storage import HostStore
from runtime.system import CudaPinner, storage_swap

DEVICE = torch.device("cuda", 0)
COUNT = 1 << 20


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated(DEVICE)
    yield
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated(DEVICE) == before


@pytest.fixture
def host() -> Iterator[HostStore]:
    store = HostStore(COUNT * 4, pinner=CudaPinner(DEVICE))
    assert store.pinned
    yield store
    torch.cuda.synchronize(DEVICE)
    store.close()


def on_host(store: HostStore) -> torch.Tensor:
    """Return the slab as floats in main memory."""
    memory = (ctypes.c_char * store.capacity_bytes).from_address(store.address)
    return torch.frombuffer(memory, dtype=torch.float32)


def test_two_storages_exchange_their_memory() -> None:
    one, other = torch.full((COUNT,), 1.0, device=DEVICE), torch.full((COUNT,), 2.0, device=DEVICE)
    view = one[10:20]
    address, fresh = one.data_ptr(), other.data_ptr()
    assert storage_swap.install(one.untyped_storage(), other.untyped_storage()) == fresh == one.data_ptr()
    assert other.data_ptr() == address and storage_swap.address(other.untyped_storage()) == address
    assert bool((view == 2).all()) and bool((other == 1).all())


def test_a_kernel_reads_and_writes_pinned_memory_through_its_stand_in(host: HostStore) -> None:
    slab = on_host(host)
    slab.fill_(3.0)
    block = torch.zeros(COUNT, device=DEVICE)
    taken = torch.cuda.memory_allocated(DEVICE)
    storage_swap.lend(block.untyped_storage(), host.address)
    assert torch.cuda.memory_allocated(DEVICE) <= taken - 4 * COUNT, "the memory that it had is freed"
    assert block.device == DEVICE and block.untyped_storage().nbytes() == 4 * COUNT
    assert block.sum().item() == 3.0 * COUNT
    block.mul_(2)
    block[::2].add_(1)
    assert block.cpu()[:2].tolist() == [7.0, 6.0], "copies to main memory work too"
    assert (block @ torch.ones(COUNT, device=DEVICE)).item() == 6.5 * COUNT, "libraries work too"
    torch._foreach_mul_([block], 2)
    torch.cuda.synchronize(DEVICE)
    assert slab[:2].tolist() == [14.0, 12.0]


def test_a_closed_storage_says_why_and_is_opened_with_other_memory() -> None:
    block = torch.full((COUNT,), 4.0, device=DEVICE)
    storage = block.untyped_storage()
    for value in (5, 6):
        address = block.data_ptr()
        storage_swap.close(storage, "it is on a drive")
        for use in (lambda: block + 1, lambda: block.sum(), lambda: block.fill_(0), lambda: block.cpu(), block.data_ptr):
            with pytest.raises(RuntimeError, match="it is on a drive"):
                use()
        assert storage_swap.address(storage) == address and storage.nbytes() == 4 * COUNT
        fresh = torch.full((COUNT,), float(value), device=DEVICE)
        storage_swap.install(storage, fresh.untyped_storage())
        assert bool((block == value).all())


def test_a_storage_that_is_let_go_while_it_is_closed_or_lent_is_freed(host: HostStore) -> None:
    closed, lent = torch.ones(COUNT, device=DEVICE), torch.ones(COUNT, device=DEVICE)
    storage_swap.close(closed.untyped_storage(), "gone")
    storage_swap.lend(lent.untyped_storage(), host.address)
    del closed, lent
