"""The cores that the quotas of control groups leave, read from directories that the tests make."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime.system.processors import machine_cores

from .test_host_limits import write

GROUPS = "sys/fs/cgroup"


def test_without_control_groups_all_cores_count(tmp_path: Path) -> None:
    assert machine_cores(tmp_path, count=16) == 16


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 16), ("250000 100000", 2.5), ("9900000 100000", 16)])
def test_a_quota_of_version_2(tmp_path: Path, quota: str, cores: float) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/job", f"{GROUPS}/job/cpu.max": quota})
    assert machine_cores(tmp_path, count=16) == cores


def test_the_lowest_quota_of_all_ancestors_counts(tmp_path: Path) -> None:
    files = {f"{GROUPS}/slurm/cpu.max": "400000 100000", f"{GROUPS}/slurm/job/cpu.max": "600000 100000"}
    write(tmp_path, {"proc/self/cgroup": "0::/slurm/job/step", f"{GROUPS}/slurm/job/step/cpu.max": "max 100000", **files})
    assert machine_cores(tmp_path, count=16) == 4


@pytest.mark.parametrize(("quota", "cores"), [("-1", 16), ("150000", 3)])
def test_a_quota_of_version_1(tmp_path: Path, quota: str, cores: float) -> None:
    folder = f"{GROUPS}/cpu/docker/abc"
    files = {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "50000"}
    write(tmp_path, {"proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n0::/", **files})
    assert machine_cores(tmp_path, count=16) == cores


def test_in_a_container_the_mount_is_the_group_itself(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/../../docker/abc", f"{GROUPS}/cpu.max": "200000 100000"})
    assert machine_cores(tmp_path, count=16) == 2


def test_this_machine_answers() -> None:
    assert 0 < machine_cores() <= (os.cpu_count() or 1)
