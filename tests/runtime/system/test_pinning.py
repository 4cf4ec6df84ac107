"""Pinning in chunks, with functions that stand for those of the CUDA runtime."""

from __future__ import annotations

import re
import resource
import threading

import pytest
import torch

from planner.errors import StorageError
from runtime.storage.host import HostStore
from runtime.system.host_limits import HostLimit
from runtime.system.pinning import PIN_CHUNK_BYTES, CudaPinner

GIB = 1 << 30
BASE = 0x7F00_0000_0000


class Runtime:
    """Registers ranges, and refuses from `fails_at` on. It is an error to register twice, or to unregister what is not."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.registered: dict[int, int] = {}
        self.threads: set[int] = set()
        self.most = 0

    def register(self, address: int, size_bytes: int) -> str | None:
        self.threads.add(threading.get_ident())
        assert size_bytes <= PIN_CHUNK_BYTES and address not in self.registered
        if self.fails_at is not None and address + size_bytes > self.fails_at:
            return "CUDA error 2 (out of memory)"
        self.registered[address] = size_bytes
        self.most = max(self.most, len(self.registered))
        return None

    def unregister(self, address: int) -> str | None:
        del self.registered[address]
        return None

    def pinner(self) -> CudaPinner:
        return CudaPinner(torch.device("cuda"), register=self.register, unregister=self.unregister)


def test_chunks_cover_the_range_and_all_are_taken_back() -> None:
    runtime = Runtime()
    pinner = runtime.pinner()
    pinner.pin(BASE, 3 * GIB + 4096)
    assert runtime.registered == {BASE: GIB, BASE + GIB: GIB, BASE + 2 * GIB: GIB, BASE + 3 * GIB: 4096}
    pinner.unpin(BASE, 3 * GIB + 4096)
    assert runtime.registered == {}


def test_a_failure_leaves_nothing_pinned_and_names_value_limit_and_remedy() -> None:
    runtime = Runtime(fails_at=BASE + 2 * GIB)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,} bytes"
    with pytest.raises(
        StorageError,
        match=re.escape(
            "cannot pin 3,221,225,472 bytes of host memory: CUDA error 2 (out of memory) after 2,147,483,648 bytes "
            f"(limit on locked memory: {text}); raise the limit (ulimit -l, or the container's), or lower host_budget"
        ),
    ):
        runtime.pinner().pin(BASE, 3 * GIB)
    assert runtime.registered == {} and runtime.most == 2


def test_cuda_is_called_in_a_thread_that_ends() -> None:
    """Otherwise PyTorch finds the error of a failed call in this thread, and takes it for one of its own."""
    runtime = Runtime(fails_at=BASE)
    with pytest.raises(StorageError):
        runtime.pinner().pin(BASE, 4096)
    assert runtime.threads and threading.get_ident() not in runtime.threads


def test_a_slab_is_pinned_whole_or_not_at_all() -> None:
    limits = (HostLimit(what="a test has", available_bytes=1 << 40, remedy="nothing"),)
    runtime = Runtime()
    store = HostStore(1 << 20, pinner=runtime.pinner(), limits=limits)
    assert store.pinned and runtime.registered == {store.address: 1 << 20}
    store.close()
    assert runtime.registered == {}
    runtime = Runtime(fails_at=0)
    store = HostStore(1 << 20, pinner=runtime.pinner(), limits=limits)
    assert not store.pinned
    store.close()
    assert runtime.registered == {}
