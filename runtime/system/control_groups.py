"""The control groups that this process is in (Linux, admin-guide/cgroup-v2 and cgroup-v1), and where their files are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

__all__ = ["ControlGroup", "control_groups", "number_in"]


class ControlGroup(NamedTuple):
    """One group. name: its path below the mount. folder: of its files. version: of the interface, 1 or 2."""

    name: str
    folder: Path
    version: int


def control_groups(root: Path, controller: str) -> Iterator[ControlGroup]:
    """Yield the groups of a controller ("memory", "cpu") that hold for this process: its own first, then all ancestors.

    root: of the file system. In a container the mount may begin at the group itself; folders that are missing there do not
    count: the files in them cannot be read. Yields nothing where there are no control groups.
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


def number_in(file: Path) -> int | None:
    """Read the number in a file. Return None if there is no such file or the number is "max"."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def _along(mount: Path, path: str, *, version: int) -> Iterator[ControlGroup]:
    parts = PurePosixPath(path).parts[1:]
    if ".." in parts:  # outside the groups that this process sees
        parts = ()
    for depth in range(len(parts), -1, -1):
        yield ControlGroup("/" + "/".join(parts[:depth]), mount.joinpath(*parts[:depth]), version)
