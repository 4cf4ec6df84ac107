"""How much host memory this process may still take: limited by the machine's free memory and by its control groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from planner.errors import StorageFullError
from runtime.system.control_groups import control_groups, number_in

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
    The page cache of a control group counts as available, because the kernel frees it on demand. All ancestors of a control
    group count too. Both versions of the interface are read.
    """
    if available_bytes is None:
        available_bytes = int(psutil.virtual_memory().available)
    machine = HostLimit(
        what="the machine has available",
        available_bytes=available_bytes,
        remedy=f"{_LOWER}, or end other programs",
    )
    return (machine, *_group_limits(root))


def check_host_memory(size_bytes: int, limits: Sequence[HostLimit]) -> None:
    """Raise StorageFullError, which names the lowest limit, if `size_bytes` more exceed it."""
    lowest = min(limits, key=lambda limit: limit.available_bytes)
    if size_bytes > lowest.available_bytes:
        raise StorageFullError(
            f"a host tier of {size_bytes:,} bytes does not fit: {lowest.what} {lowest.available_bytes:,} bytes; {lowest.remedy}"
        )


def _group_limits(root: Path) -> Iterator[HostLimit]:
    for group in control_groups(root, "memory"):
        available = _version_2(group.folder) if group.version == 2 else _version_1(group.folder)
        if available is not None:
            yield HostLimit(
                what=f"the memory limit of the control group {group.name} leaves",
                available_bytes=max(available, 0),
                remedy=f"{_LOWER}, or raise the limit of the container or job",
            )


def _version_2(group: Path) -> int | None:
    limits = [limit for name in ("memory.max", "memory.high") if (limit := number_in(group / name)) is not None]
    used = number_in(group / "memory.current")
    if not limits or used is None:
        return None
    return min(limits) - used + _statistics(group, "inactive_file", "active_file")


def _version_1(group: Path) -> int | None:
    limit, used = number_in(group / "memory.limit_in_bytes"), number_in(group / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    return limit - used + _statistics(group, "total_inactive_file", "total_active_file")


def _statistics(group: Path, *names: str) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(number) for name, number in (line.split() for line in lines) if name in names)
