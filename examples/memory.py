"""Memory of this process as Linux counts it, see proc(5)."""

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_FIELDS = ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem")


@dataclass(slots=True)
class Held:
    """What the process holds, in bytes. before: when the watch began. highest: since then."""

    before: int
    highest: int


def resident_bytes() -> dict[str, int]:
    """Return the resident bytes now (VmRSS = RssAnon + RssFile + RssShmem) and their peak since the last reset (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines)
    return {name: int(value.split()[0]) * 1024 for name, value in pairs if name in _FIELDS}


def held_bytes() -> int:
    """Return the anonymous and shared bytes that are resident now.

    Pages of mapped files belong to the system's cache, which takes them away when memory is short.
    """
    resident = resident_bytes()
    return resident["RssAnon"] + resident["RssShmem"]


@contextmanager
def watched(measure: Callable[[], int] = held_bytes, every_seconds: float = 0.005) -> Iterator[Held]:
    """Watch what the process holds within the block, as `measure` tells, in a thread that looks every so many seconds."""
    now = measure()
    held, ended = Held(now, now), threading.Event()

    def watch() -> None:
        while not ended.wait(every_seconds):
            held.highest = max(held.highest, measure())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield held
    finally:
        ended.set()
        watching.join()


def reset_peak() -> None:
    """Set the peak (VmHWM) to the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def give_free_memory_back() -> None:
    """Collect garbage, and let the C library return its free pages to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
