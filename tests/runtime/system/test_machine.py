"""The machine: limits of memory and cores, pages near a device, from directories that the tests make; pinned pages."""

from __future__ import annotations

import logging
import os
import re
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from planner.errors import StorageError, StorageFullError
from runtime.system import (
    PIN_CHUNK_BYTES,
    CudaPinner,
    HostLimit,
    check_host_memory,
    host_limits,
    machine_cores,
    on_processors,
    pci_address,
    processors_near,
)

GROUPS = "sys/fs/cgroup"
Files = dict[str, str]


def write(root: Path, group: str, files: Files) -> None:
    """Let this process be in a group; the files are those under the mount."""
    for name, text in {"proc/self/cgroup": group, **{f"{GROUPS}/{name}": text for name, text in files.items()}}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


MEMORY: dict[str, tuple[str, Files, dict[str, int]]] = {
    "what is used and cannot be reclaimed counts": (
        "0::/job",
        {
            "job/memory.max": "1000",
            "job/memory.high": "max",
            "job/memory.current": "700",
            "job/memory.stat": "anon 400\nfile 300\ninactive_file 120\nactive_file 80\nshmem 100",
        },
        {"/job": 1000 - 700 + 120 + 80},
    ),
    "ancestors count, and groups without a limit do not": (
        "0::/slurm/job/step",
        {
            "slurm/memory.max": "5000",
            "slurm/memory.current": "4700",
            "slurm/job/memory.max": "max",
            "slurm/job/memory.current": "4000",
            "slurm/job/step/memory.max": "4500",
            "slurm/job/step/memory.current": "3500",
        },
        {"/slurm": 300, "/slurm/job/step": 1000},
    ),
    "version 1 has other files and a mount of its own": (
        "9:name=systemd:/x\n4:cpu,memory:/docker/abc\n0::/",
        {
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/memory.usage_in_bytes": "1000",
            "memory/docker/abc/memory.limit_in_bytes": "8000",
            "memory/docker/abc/memory.usage_in_bytes": "3000",
            "memory/docker/abc/memory.stat": "inactive_file 1\ntotal_inactive_file 500\ntotal_active_file 250",
        },
        {"/docker/abc": 5750, "/": 9223372036854770712},
    ),
    "over its limit it leaves nothing": ("0::/job", {"job/memory.high": "1000", "job/memory.current": "1200"}, {"/job": 0}),
}


@pytest.mark.parametrize("case", MEMORY)
def test_what_groups_leave_of_memory(tmp_path: Path, case: str) -> None:
    group, files, expected = MEMORY[case]
    write(tmp_path, group, files)
    machine, *groups = host_limits(tmp_path, available_bytes=10**12)
    assert (machine.what, machine.available_bytes) == ("the machine has available", 10**12)
    assert {limit.what.split()[-2]: limit.available_bytes for limit in groups} == expected


V1 = "cpu/docker/abc"
CORES: dict[str, tuple[str, Files, float]] = {
    "no limit": ("0::/job", {"job/cpu.max": "max 100000"}, 16),
    "a quota": ("0::/job", {"job/cpu.max": "250000 100000"}, 2.5),
    "the lowest of all ancestors": (
        "0::/slurm/job/step",
        {"slurm/job/step/cpu.max": "max 100000", "slurm/cpu.max": "400000 100000", "slurm/job/cpu.max": "600000 100000"},
        4,
    ),
    "version 1": (
        "4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n0::/",
        {f"{V1}/cpu.cfs_quota_us": "150000", f"{V1}/cpu.cfs_period_us": "50000"},
        3,
    ),
    "in a container": ("0::/../../docker/abc", {"cpu.max": "200000 100000"}, 2),
    "version 1, no limit": ("4:cpu:/docker/abc", {f"{V1}/cpu.cfs_quota_us": "-1", f"{V1}/cpu.cfs_period_us": "50000"}, 16),
}


@pytest.mark.parametrize("case", CORES)
def test_what_groups_leave_of_the_cores(tmp_path: Path, case: str) -> None:
    group, files, expected = CORES[case]
    write(tmp_path, group, files)
    assert machine_cores(tmp_path, count=16) == expected


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    (limit,) = host_limits(tmp_path, available_bytes=5000)
    assert limit.available_bytes == 5000 and machine_cores(tmp_path, count=16) == 16


def test_the_lowest_limit_is_named_with_its_remedy(tmp_path: Path) -> None:
    write(tmp_path, "0::/job", {"job/memory.max": "9000", "job/memory.current": "1000"})
    limits = host_limits(tmp_path, available_bytes=20_000)
    check_host_memory(8000, limits)
    with pytest.raises(
        StorageFullError,
        match="host tier of 8,001 bytes does not fit: the memory limit of the control group /job leaves 8,000 bytes; "
        "lower host_budget, or raise the limit of the container or job",
    ):
        check_host_memory(8001, limits)
    with pytest.raises(StorageFullError, match="the machine has available 20,000 bytes; lower host_budget, or end other"):
        check_host_memory(20_001, limits[:1])


def test_this_machine_answers() -> None:
    machine, *groups = host_limits()
    assert 0 < machine.available_bytes <= psutil.virtual_memory().total
    assert all(isinstance(group, HostLimit) and group.available_bytes >= 0 for group in groups)
    assert 0 < machine_cores() <= (os.cpu_count() or 1)


# -- pages near a device, and pinned ones

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


class Runtime(CudaPinner):
    """Registers ranges, and refuses from `fails_at` on. It is an error to register twice, or to unregister what is not."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__(torch.device("cuda"))
        self.fails_at = fails_at
        self.registered: dict[int, int] = {}
        self.threads: set[int] = set()
        self.most = 0

    def _register(self, address: int, size_bytes: int) -> str | None:
        self.threads.add(threading.get_ident())
        assert size_bytes <= PIN_CHUNK_BYTES and address not in self.registered
        if self.fails_at is not None and address + size_bytes > self.fails_at:
            return "CUDA error 2 (out of memory)"
        self.registered[address] = size_bytes
        self.most = max(self.most, len(self.registered))
        return None

    def _unregister(self, address: int) -> str | None:
        del self.registered[address]
        return None


def test_chunks_cover_the_range_and_all_are_taken_back() -> None:
    runtime = Runtime()
    runtime.pin(BASE, 3 * GIB + 4096)
    assert runtime.registered == {BASE: GIB, BASE + GIB: GIB, BASE + 2 * GIB: GIB, BASE + 3 * GIB: 4096}
    runtime.unpin(BASE, 3 * GIB + 4096)
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
        runtime.pin(BASE, 3 * GIB)
    assert runtime.registered == {} and runtime.most == 2
    # In a thread that ends: otherwise PyTorch finds the error of the failed call here, and takes it for one of its own.
    assert runtime.threads and threading.get_ident() not in runtime.threads
