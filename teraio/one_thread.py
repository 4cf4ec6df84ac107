"""One thread trains: what another one begins meanwhile is refused."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from planner.errors import UnsupportedError

_AT_WORK = threading.RLock()
"""One for the process: what PyTorch traces with is not safe for threads, and models share budgets and drives."""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compile or run a graph within the block. Raises UnsupportedError if another thread does so at this moment. Never waits."""
    if not _AT_WORK.acquire(blocking=False):
        raise UnsupportedError(
            f"thread {threading.current_thread().name!r} compiles or runs a model while another thread does: teraio trains in "
            "one thread at a time; train one model after the other, or in processes of their own"
        )
    try:
        yield
    finally:
        _AT_WORK.release()
