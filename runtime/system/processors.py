"""How many of the machine's cores this process and others beside it may use: control groups limit processor time, too."""

from __future__ import annotations

import os
from pathlib import Path

from runtime.system.control_groups import control_groups, number_in

__all__ = ["machine_cores"]


def machine_cores(root: Path = Path("/"), *, count: int | None = None) -> float:
    """Return the machine's cores, or as many as the quotas of this process's control groups amount to if that is less.

    1.5 cores: a second and a half of processor time in each second. root: of the file system that is read. count: of the
    machine's cores, by default as Python counts them. Never waits.
    """
    quotas = [_quota(group.folder, group.version) for group in control_groups(root, "cpu")]
    return min((count or os.cpu_count() or 1, *(quota for quota in quotas if quota is not None)))


def _quota(folder: Path, version: int) -> float | None:
    """Return the cores that a group leaves; None if it sets no limit."""
    if version == 1:
        quota, period = number_in(folder / "cpu.cfs_quota_us"), number_in(folder / "cpu.cfs_period_us")
        return quota / period if quota is not None and quota > 0 and period else None
    try:
        allowed, each = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if allowed == "max" else int(allowed) / int(each)
