"""What this process holds of the system."""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """resident_bytes: of this process. disk_bytes: of the files under the directory that was given. children: processes."""

    resident_bytes: int
    descriptors: int
    threads: int
    children: int
    disk_bytes: int

    @classmethod
    def now(cls, folder: Path) -> Holdings:
        """Collect garbage first."""
        gc.collect()
        process = psutil.Process()
        return cls(
            resident_bytes=process.memory_info().rss,
            descriptors=process.num_fds(),
            threads=process.num_threads(),
            children=len(process.children(recursive=True)),
            disk_bytes=sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file()),
        )

    def __str__(self) -> str:
        parts = {**asdict(self), "resident_bytes": f"{self.resident_bytes / MIB:.0f} MiB"}
        return ", ".join(f"{name.removesuffix('_bytes')} {part}" for name, part in parts.items())
