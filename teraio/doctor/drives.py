"""The paths between a device and directories on drives: which work, and how fast they are."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from planner.errors import TeraioError
from runtime.cuda import cuda_candidates
from runtime.storage import KvikioStore
from runtime.transfer import Engine, LinkRates, TorchMemory, choose_path, cpu_candidates
from teraio.doctor.finding import Finding

_SLOW = 1e9
"""Bytes per second in each direction, while both are busy, below which a drive holds most trainings up."""
_LITTLE_ROOM = 32 << 30
_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveReport:
    """rates: None if no path works."""

    findings: tuple[Finding, ...]
    rates: LinkRates | None


def drive(directory: Path, device: torch.device) -> DriveReport:
    """Try and measure the paths between `device` and a directory. Takes seconds, and some hundred MiB there meanwhile."""
    what = f"storage {directory}"
    if not directory.is_dir():
        missing = Finding(what=what, verdict="missing", found="there is no such directory", remedy=f"mkdir -p {directory}")
        return DriveReport(findings=(missing,), rates=None)
    on_gpu = device.type == "cuda"
    candidates = (
        cuda_candidates([directory], device, budget_bytes=None, checksums=False)
        if on_gpu
        else cpu_candidates([directory], budget_bytes=None)
    )
    try:
        path = choose_path(candidates, open_engine=lambda store: Engine(store, memory=TorchMemory(device)))
    except TeraioError as error:
        failed = Finding(what=what, verdict="missing", found=str(error), effect="no block can wait there")
        return DriveReport(findings=(failed, *_place(what, directory)), rates=None)
    rates, store = path.rates, path.store
    how = store.description if isinstance(store, KvikioStore) else path.name
    path.close()
    findings = [_speed(what, path.name, how, rates)]
    for name, reason in path.refused.items():
        findings.append(Finding(what=what, verdict="note", found=f"the path {name!r} is not used: {reason}"))
    return DriveReport(findings=(*findings, *_place(what, directory)), rates=rates)


def _speed(what: str, name: str, how: str, rates: LinkRates) -> Finding:
    both = min(rates.duplex_write_bytes_per_second, rates.duplex_read_bytes_per_second)
    found = (
        f"path {how!r}: writes {rates.write_bytes_per_second / 1e9:.2f} GB/s, "
        f"reads {rates.read_bytes_per_second / 1e9:.2f} GB/s, both at once {rates.duplex_write_bytes_per_second / 1e9:.2f} and "
        f"{rates.duplex_read_bytes_per_second / 1e9:.2f}"
    )
    if name == "buffered":
        return Finding(
            what=what,
            verdict="slow",
            found=found,
            effect="spill files go through the page cache, which is host memory that no budget counts",
            remedy="give a directory on a file system with direct I/O, such as ext4 or xfs",
        )
    if both < _SLOW:
        return Finding(
            what=what,
            verdict="slow",
            found=found,
            effect="training waits for it unless little has to move",
            remedy="give a directory on an NVMe drive, several such directories, or a host_budget",
        )
    return Finding(what=what, verdict="ok", found=found)


def _place(what: str, directory: Path) -> Iterator[Finding]:
    kind = _file_system(directory, psutil.disk_partitions(all=True))
    if kind in _IN_MEMORY:
        yield Finding(
            what=what,
            verdict="slow",
            found=f"the file system is {kind}: it is memory, not a drive",
            effect="blocks that wait there take main memory, which no budget counts",
            remedy="give a directory on a drive; for main memory, give host_budget",
        )
    free = shutil.disk_usage(directory).free
    yield Finding(
        what=what,
        verdict="ok" if free >= _LITTLE_ROOM else "note",
        found=f"{free / 2**30:.0f} GiB free ({kind})",
        effect="" if free >= _LITTLE_ROOM else "large models need more",
    )


def _file_system(directory: Path, partitions: Sequence[psutil._common.sdiskpart]) -> str:
    """Return the type of the file system that the directory lies in: that of the innermost mount point."""
    place = directory.resolve()
    inside = [p for p in partitions if place.is_relative_to(p.mountpoint)]
    return max(inside, key=lambda p: len(Path(p.mountpoint).parts)).fstype if inside else "unknown"
