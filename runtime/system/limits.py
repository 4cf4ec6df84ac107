"""How much of the machine this process may use: memory and cores, as far as its control groups leave them.

Control groups are those of Linux (admin-guide/cgroup-v2 and cgroup-v1).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

from planner.errors import StorageFullError

_LOWER = "lower host_budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimit:
    """One limit on the memory that this process may still take.

    what: the first half of a message; the number of bytes follows ("the machine has available").
    remedy: what the user can do about it.
    """

    what: str
    available_bytes: int
    remedy: str


def host_limits(root: Path = Path("/"), *, available_bytes: int | None = None) -> tuple[HostLimit, ...]:
    """Return all limits that hold for this process now, read from the files under `root`. Never waits.

    available_bytes: memory that the machine has for new programs without swapping, by default as psutil reports it.
    All ancestors of a control group count too. Both versions of the interface are read.
    """
    if available_bytes is None:
        available_bytes = int(psutil.virtual_memory().available)
    machine = HostLimit(
        what="the machine has available", available_bytes=available_bytes, remedy=f"{_LOWER}, or end other programs"
    )
    found = [machine]
    for group in _control_groups(root, "memory"):
        available = _memory_left(group)
        if available is not None:
            what = f"the memory limit of the control group {group.name} leaves"
            remedy = f"{_LOWER}, or raise the limit of the container or job"
            found.append(HostLimit(what=what, available_bytes=max(available, 0), remedy=remedy))
    return tuple(found)


def check_host_memory(size_bytes: int, limits: Sequence[HostLimit]) -> None:
    """Raise StorageFullError, which names the lowest limit, if `size_bytes` more exceed it."""
    lowest = min(limits, key=lambda limit: limit.available_bytes)
    if size_bytes > lowest.available_bytes:
        raise StorageFullError(
            f"a host tier of {size_bytes:,} bytes does not fit: {lowest.what} {lowest.available_bytes:,} bytes; {lowest.remedy}"
        )


def machine_cores(root: Path = Path("/"), *, count: int | None = None) -> float:
    """Return the machine's cores, or as many as the quotas of this process's control groups amount to if that is less.

    1.5 cores: a second and a half of processor time in each second. root: of the file system that is read. count: of the
    machine's cores, by default as Python counts them. Never waits.
    """
    quotas = [_quota(group) for group in _control_groups(root, "cpu")]
    return min((count or os.cpu_count() or 1, *(quota for quota in quotas if quota is not None)))


def _memory_left(group: _ControlGroup) -> int | None:
    """Return the bytes that a group leaves; None if it sets no limit."""
    if group.version == 2:
        names, usage, cached = ["memory.max", "memory.high"], "memory.current", ["inactive_file", "active_file"]
    else:
        names, usage = ["memory.limit_in_bytes"], "memory.usage_in_bytes"
        cached = ["total_inactive_file", "total_active_file"]
    limits = [limit for name in names if (limit := _number_in(group.folder / name)) is not None]
    used = _number_in(group.folder / usage)
    if not limits or used is None:
        return None
    # The kernel frees the page cache of a group on demand, so it counts as available.
    return min(limits) - used + _statistics(group.folder / "memory.stat", cached)


def _statistics(file: Path, names: Sequence[str]) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(number) for name, number in (line.split() for line in lines) if name in names)


def _quota(group: _ControlGroup) -> float | None:
    """Return the cores that a group leaves; None if it sets no limit."""
    if group.version == 1:
        quota, period = _number_in(group.folder / "cpu.cfs_quota_us"), _number_in(group.folder / "cpu.cfs_period_us")
        return quota / period if quota is not None and quota > 0 and period else None  # no limit is written as -1
    try:
        allowed, each = (group.folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if allowed == "max" else int(allowed) / int(each)


class _ControlGroup(NamedTuple):
    """One group. name: its path below the mount. folder: of its files. version: of the interface, 1 or 2."""

    name: str
    folder: Path
    version: int


def _control_groups(root: Path, controller: str) -> Iterator[_ControlGroup]:
    """Yield the groups of a controller ("memory", "cpu") that hold for this process: its own first, then all ancestors.

    Yields nothing where there are no control groups.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no control groups, or no /proc
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _along(mount, path, version=2)
        elif controller in controllers.split(","):
            yield from _along(mount / controller, path, version=1)


def _along(mount: Path, path: str, *, version: int) -> Iterator[_ControlGroup]:
    # In a container the mount may begin at the group itself. No file is found in folders that are missing there.
    parts = PurePosixPath(path).parts[1:]
    if ".." in parts:  # outside the groups that this process sees
        parts = ()
    for depth in range(len(parts), -1, -1):
        yield _ControlGroup("/" + "/".join(parts[:depth]), mount.joinpath(*parts[:depth]), version)


def _number_in(file: Path) -> int | None:
    """Read the number in a file. Return None if there is no such file or the number is "max"."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)
