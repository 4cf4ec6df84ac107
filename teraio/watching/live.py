"""A line on the terminal that says what the latest iteration took."""

from __future__ import annotations

import atexit
import time
from typing import Any

from teraio.watching.stats import IterationStats

_SHOWN_SECONDS = 0.2
"""A line stands for this long at least: short iterations are not all shown."""


class LiveLine:
    """Shows each iteration in one line, in place of the one before. Prints of the program scroll by above it.

    console: a `rich` console; default: standard error. Shows nothing where that is no terminal.
    """

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.live import Live

        console = console or Console(stderr=True)
        self._live = Live("", console=console, auto_refresh=False) if console.is_terminal else None
        self._shown = 0.0

    def __call__(self, stats: IterationStats) -> None:
        """Show one iteration."""
        now = time.monotonic()
        if self._live is None or now - self._shown < _SHOWN_SECONDS:
            return
        if not self._live.is_started:
            self._live.start()
            atexit.register(self.close)
        self._shown = now
        self._live.update(line(stats), refresh=True)

    def close(self) -> None:
        """Leave the last line where it is, and give the cursor back."""
        if self._live is not None and self._live.is_started:
            self._live.stop()
            atexit.unregister(self.close)


def line(stats: IterationStats) -> str:
    """Return what an iteration took, in one line."""
    seconds = f"{stats.seconds:.3g} s"
    if stats.predicted_seconds is not None:
        seconds += f" (predicted {stats.predicted_seconds:.3g} s)"
    parts = [f"teraio: iteration {stats.iteration}, {stats.phase}: {seconds}, waited {stats.waited_seconds:.3g} s"]
    if stats.recompute_seconds:
        parts.append(f"recomputed {stats.recompute_seconds:.3g} s")
    parts.append(", ".join(f"{tier} {_size(value)}" for tier, value in stats.tier_bytes.items()))
    for link, moved in stats.moved_bytes.items():
        rate = stats.bytes_per_second(link)
        if rate is not None:
            parts.append(f"{link} {_size(moved)} at {rate / 1e9:.2f} GB/s")
    return " | ".join(parts)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.0f} MiB"
