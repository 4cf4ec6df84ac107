"""How much memory a stage needs beyond its inputs and outputs: estimated at first, measured once it has run."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from runtime.execution.program import Stage


class MeasuredMemory(Protocol):
    """An allocator that counts bytes."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes that are allocated now."""

    @property
    def peak_bytes(self) -> int:
        """The highest `allocated_bytes` since the last reset."""

    def reset_peak(self) -> None:
        """Forget the peak so far."""


_Key = tuple[int, int, int]


class WorkspaceMeter:
    """Measures each distinct stage when it runs under management. The largest measurement counts.

    memory: the allocator of the stages; None if it cannot be asked, then the estimates stay. It does not see what libraries
    allocate by themselves. runs: number of runs that are measured for each stage, where asking takes long; None for all.
    first_is_special: the second run replaces the measurement of the first, in which kernels are tuned and libraries set up.
    """

    def __init__(self, memory: MeasuredMemory | None, *, runs: int | None = None, first_is_special: bool = False) -> None:
        self._memory = memory
        self._runs = runs
        self._first_is_special = first_is_special
        self._counts: Counter[_Key] = Counter()
        self._measured: dict[_Key, int] = {}

    def workspace_bytes(self, stage: Stage) -> int:
        """Return the bytes beyond inputs and outputs: measured, or estimated if the stage has not run yet."""
        return self._measured.get(_key(stage), stage.workspace_bytes)

    @contextlib.contextmanager
    def watching(self, stage: Stage) -> Iterator[None]:
        """Measure the run of `stage` inside this context."""
        key = _key(stage)
        if self._memory is None or (self._runs is not None and self._counts[key] >= self._runs):
            yield
            return
        self._counts[key] += 1
        self._memory.reset_peak()
        before = self._memory.allocated_bytes
        yield
        beyond = max(0, self._memory.peak_bytes - before - stage.output_bytes)
        known = 0 if self._first_is_special and self._counts[key] == 2 else self._measured.get(key, 0)
        self._measured[key] = max(beyond, known)


def _key(stage: Stage) -> _Key:
    """Stages with the same code and sizes need the same workspace. Compiled stages live as long as their compiler."""
    return id(stage.run), stage.input_bytes, stage.output_bytes
