"""Memory of this process as Linux saw it (proc(5)), not as any allocator counted it."""

import ctypes
import gc
from pathlib import Path

_FIELDS = ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem")


def resident_bytes() -> dict[str, int]:
    """Resident now (VmRSS = RssAnon + RssFile + RssShmem) and the peak since the last reset (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines)
    return {name: int(value.split()[0]) * 1024 for name, value in pairs if name in _FIELDS}


def reset_peak() -> None:
    """Sets VmHWM to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def give_free_memory_back() -> None:
    """Collects garbage and has the C library return the pages it keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
