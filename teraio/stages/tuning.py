"""Lets Inductor tune a stage's kernels within the memory that the stage has.

[Note: Tuning within a budget]
Inductor chooses the blocks of a GPU's kernels by trying them when a stage runs for the first time. Before each trial it empties
the GPU's cache with a buffer of the cache's size, some 60 MiB. No estimate of a stage contains this buffer, and a small budget
has no room for it. It is left out for teraio's stages: counted, it would raise the smallest budget that works for a whole
training, for the sake of one iteration. Beyond the budget, it would break the promise on a GPU that has no more memory. What is
lost: trials find their inputs in the cache as far as they fit. In training they often are there too, since the kernel before
has just made them, and kernels over more bytes than the cache holds are measured as before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from runtime.execution import StageFunction

_CACHE_SIZE = "L2_cache_size"
"""The attribute in which Inductor's benchmarker remembers the size of the cache that it empties."""
_SMALLEST_BYTES = 4096


def tuned_within_budget(run: StageFunction) -> StageFunction:
    """Return a function that does the same as `run`, and whose first run that succeeds tunes without that buffer."""
    tuned = False

    def first_tunes(values: list[Any]) -> Sequence[Any]:
        nonlocal tuned
        if tuned:
            return run(values)
        with cache_stays():
            made = run(values)
        torch._C._host_emptyCache()  # copies of arguments that kernels write: pinned memory, which no budget knows
        tuned = True
        return made

    return first_tunes


@contextlib.contextmanager
def cache_stays() -> Iterator[None]:
    """Let Inductor measure kernels without emptying the GPU's cache."""
    from torch._inductor.runtime.benchmarking import benchmarker

    known = vars(benchmarker)
    before = known.get(_CACHE_SIZE)
    known[_CACHE_SIZE] = _SMALLEST_BYTES
    try:
        yield
    finally:
        del known[_CACHE_SIZE]
        if before is not None:
            known[_CACHE_SIZE] = before
