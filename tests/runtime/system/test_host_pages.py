"""Pages near a device, by a sysfs that the tests make; pinned pages, with functions that stand for those of the CUDA runtime."""

from __future__ import annotations

import logging
import os
import re
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from planner.errors import StorageError
from runtime.system import PIN_CHUNK_BYTES, CudaPinner, on_processors, pci_address, processors_near

GPU = "0000:3b:00.0"
GIB = 1 << 30
BASE = 0x7F00_0000_0000


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    for node, processors in enumerate(("0-3,8-11", "4-7,12,14")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(processors + "\n")
    (tmp_path / "sys/devices/system/node/possible").write_text("0-1\n")
    attach(tmp_path, "1")
    return tmp_path


def attach(root: Path, node: str) -> None:
    device = root / "sys/bus/pci/devices" / GPU
    device.mkdir(parents=True, exist_ok=True)
    (device / "numa_node").write_text(node + "\n")


def test_the_name_of_a_device() -> None:
    assert pci_address(0, 0x3B, 0) == GPU
    assert pci_address(0x10000, 0xFF, 0x1F) == "10000:ff:1f.0"


def test_processors_near_a_device(two_nodes: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "runtime.system.host_pages"):
        assert processors_near(GPU, two_nodes) == {4, 5, 6, 7, 12, 14}
        attach(two_nodes, "0")
        assert processors_near(GPU.upper(), two_nodes) == {0, 1, 2, 3, 8, 9, 10, 11}
    assert not caplog.records


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("no node", "the system does not know the device's node"),
        ("no device", "the system does not know the device's node"),
        ("no processors", "node 1 has no processors"),
        ("one node", "the machine has one node of memory"),
    ],
)
def test_why_it_makes_no_difference_is_logged(
    two_nodes: Path, caplog: pytest.LogCaptureFixture, change: str, reason: str
) -> None:
    nodes = two_nodes / "sys/devices/system/node"
    if change == "no node":
        attach(two_nodes, "-1")
    elif change == "no device":
        (two_nodes / "sys/bus/pci/devices" / GPU / "numa_node").unlink()
    elif change == "no processors":
        (nodes / "node1/cpulist").write_text("\n")
    else:
        (nodes / "node1/cpulist").unlink()
        (nodes / "node1").rmdir()
    with caplog.at_level(logging.INFO, "runtime.system.host_pages"):
        assert processors_near(GPU, two_nodes) is None
    assert [record.getMessage() for record in caplog.records] == [f"host memory is not placed near device {GPU}: {reason}"]


def test_a_thread_runs_on_the_processors_and_only_it() -> None:
    allowed = os.sched_getaffinity(0)
    chosen = frozenset({max(allowed)})

    def look() -> tuple[set[int], set[int]]:
        with on_processors(chosen | {1023}):
            inside = os.sched_getaffinity(0)
        return inside, os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(look)
        assert os.sched_getaffinity(0) == allowed
        assert future.result() == (chosen, allowed)
    with pytest.raises(KeyError), on_processors(chosen):
        raise KeyError
    assert os.sched_getaffinity(0) == allowed


def test_processors_that_are_not_allowed_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    allowed = os.sched_getaffinity(0)
    with caplog.at_level(logging.INFO, "runtime.system.host_pages"):
        with on_processors(None):
            assert os.sched_getaffinity(0) == allowed
        assert not caplog.records
        with on_processors(frozenset({1022, 1023})):
            assert os.sched_getaffinity(0) == allowed
    assert "may not run on [1022, 1023]" in caplog.text


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
    # In a thread that ends: otherwise PyTorch finds the error of the failed call here, and takes it for one of its own.
    assert runtime.threads and threading.get_ident() not in runtime.threads
