"""The limits of the machine and its control groups, read from directories that the tests make."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from planner.errors import StorageFullError
from runtime.system import HostLimit, check_host_memory, host_limits, machine_cores

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
    "the lower of both limits counts": (
        "0::/job",
        {"job/memory.max": "1000", "job/memory.high": "600", "job/memory.current": "100"},
        {"/job": 500},
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
    "in a container the mount is the group itself": (
        "0::/docker/0123abcd",
        {"memory.max": "3000", "memory.current": "1000"},
        {"/": 2000},
    ),
    "what lies outside the mount is not read": (
        "0::/../../docker/0123abcd",
        {
            "memory.max": "3000",
            "memory.current": "1000",
            "../../../docker/0123abcd/memory.max": "1",
            "../../../docker/0123abcd/memory.current": "0",
        },
        {"/": 2000},
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
    "a quota above the machine": ("0::/job", {"job/cpu.max": "9900000 100000"}, 16),
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
    "version 1, no limit": ("4:cpu:/docker/abc", {f"{V1}/cpu.cfs_quota_us": "-1", f"{V1}/cpu.cfs_period_us": "50000"}, 16),
    "in a container": ("0::/../../docker/abc", {"cpu.max": "200000 100000"}, 2),
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
