"""How long planning may still take, for all that plans, and what it need not take.

The limit counts processor time of this process: what others do on the machine does not count. Where it ends a search, the best
plan so far counts: whoever searches asks `out_of_time` before each further step, and solvers get `seconds_left`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf

_end: ContextVar[float] = ContextVar("_end", default=inf)  # in processor time


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Let what plans inside end after about so many seconds from now; an outer limit may be shorter."""
    token = _end.set(min(_end.get(), time.process_time() + seconds))
    try:
        yield
    finally:
        _end.reset(token)


def seconds_left() -> float:
    """Return what is left of the limit, 0 where it has passed, and infinity where there is none."""
    return max(_end.get() - time.process_time(), 0.0)


def out_of_time() -> bool:
    """Return whether the limit has passed."""
    return time.process_time() >= _end.get()


@contextmanager
def without_collections() -> Iterator[None]:
    """Keep Python from searching for cyclic garbage: planning makes none, and a tenth of its time went into that."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
