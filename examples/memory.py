"""Memory of this process as Linux counts it, see proc(5)."""

import ctypes
import gc
from pathlib import Path

_FIELDS = ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem")


def resident_bytes() -> dict[str, int]:
    """Return the resident bytes now (VmRSS = RssAnon + RssFile + RssShmem) and their peak since the last reset (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines)
    return {name: int(value.split()[0]) * 1024 for name, value in pairs if name in _FIELDS}


def reset_peak() -> None:
    """Set the peak (VmHWM) to the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def give_free_memory_back() -> None:
    """Collect garbage, and let the C library return its free pages to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
