"""The limits of the machine and its control groups, read from directories that the tests make."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from planner.errors import StorageFullError
from runtime.system.host_limits import HostLimit, check_host_memory, host_limits


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def found(root: Path) -> dict[str, int]:
    """Return the limits of control groups: the name of each group, and the bytes that it leaves."""
    limits = host_limits(root, available_bytes=10**12)[1:]
    return {limit.what.split()[-2]: limit.available_bytes for limit in limits}


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    (limit,) = host_limits(tmp_path, available_bytes=5000)
    assert (limit.what, limit.available_bytes) == ("the machine has available", 5000)


def test_a_group_of_version_2_leaves_its_limit_without_what_is_used_and_cannot_be_reclaimed(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job",
            "sys/fs/cgroup/job/memory.max": "1000",
            "sys/fs/cgroup/job/memory.high": "max",
            "sys/fs/cgroup/job/memory.current": "700",
            "sys/fs/cgroup/job/memory.stat": "anon 400\nfile 300\ninactive_file 120\nactive_file 80\nshmem 100",
        },
    )
    assert found(tmp_path) == {"/job": 1000 - 700 + 120 + 80}


def test_the_lower_of_both_limits_of_version_2_counts(tmp_path: Path) -> None:
    group = {"memory.max": "1000", "memory.high": "600", "memory.current": "100"}
    write(tmp_path, {"proc/self/cgroup": "0::/job", **{f"sys/fs/cgroup/job/{name}": text for name, text in group.items()}})
    assert found(tmp_path) == {"/job": 500}


def test_ancestors_count_and_groups_without_a_limit_do_not(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slurm/job/step",
            "sys/fs/cgroup/slurm/memory.max": "5000",
            "sys/fs/cgroup/slurm/memory.current": "4700",
            "sys/fs/cgroup/slurm/job/memory.max": "max",
            "sys/fs/cgroup/slurm/job/memory.current": "4000",
            "sys/fs/cgroup/slurm/job/step/memory.max": "4500",
            "sys/fs/cgroup/slurm/job/step/memory.current": "3500",
        },
    )
    assert found(tmp_path) == {"/slurm": 300, "/slurm/job/step": 1000}


def test_version_1_has_other_files_and_a_mount_of_its_own(tmp_path: Path) -> None:
    memory = "sys/fs/cgroup/memory"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "9:name=systemd:/x\n4:cpu,memory:/docker/abc\n0::/",
            f"{memory}/memory.limit_in_bytes": "9223372036854771712",
            f"{memory}/memory.usage_in_bytes": "1000",
            f"{memory}/docker/abc/memory.limit_in_bytes": "8000",
            f"{memory}/docker/abc/memory.usage_in_bytes": "3000",
            f"{memory}/docker/abc/memory.stat": "inactive_file 1\ntotal_inactive_file 500\ntotal_active_file 250",
        },
    )
    assert found(tmp_path) == {"/docker/abc": 5750, "/": 9223372036854770712}


@pytest.mark.parametrize("path", ["/docker/0123abcd", "/../../docker/0123abcd"])
def test_in_a_container_the_mount_is_the_group_itself(tmp_path: Path, path: str) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": f"0::{path}",
            "sys/fs/cgroup/memory.max": "3000",
            "sys/fs/cgroup/memory.current": "1000",
            "docker/0123abcd/memory.max": "1",  # outside the mount
            "docker/0123abcd/memory.current": "0",
        },
    )
    assert found(tmp_path) == {"/": 2000}


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job",
            "sys/fs/cgroup/job/memory.high": "1000",
            "sys/fs/cgroup/job/memory.current": "1200",
        },
    )
    assert found(tmp_path) == {"/job": 0}


def test_the_lowest_limit_is_named_with_its_remedy(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job",
            "sys/fs/cgroup/job/memory.max": "9000",
            "sys/fs/cgroup/job/memory.current": "1000",
        },
    )
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
