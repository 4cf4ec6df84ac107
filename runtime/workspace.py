"""How much memory a stage needs beyond its inputs and outputs: estimated until it has run once, then measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from runtime.cpu_memory import CpuMemory
from runtime.program import Stage

_Key = tuple[int, int, int]


class WorkspaceMeter:
    """Measures every distinct stage whenever it runs under management; the largest measurement counts.

    memory: what the stages allocate from; None if it cannot be asked, then estimates are all there is. What libraries
    allocate by themselves is not seen.
    """

    def __init__(self, memory: CpuMemory | None) -> None:
        self._memory = memory
        self._measured: dict[_Key, int] = {}

    def workspace_bytes(self, stage: Stage) -> int:
        """Bytes beyond inputs and outputs: as measured, or estimated if the stage has not run yet."""
        return self._measured.get(_key(stage), stage.workspace_bytes)

    @contextlib.contextmanager
    def watching(self, stage: Stage) -> Iterator[None]:
        """Around a run of `stage`: measures it."""
        if self._memory is None:
            yield
            return
        self._memory.reset_peak()
        before = self._memory.allocated_bytes
        yield
        beyond = max(0, self._memory.peak_bytes - before - stage.output_bytes)
        self._measured[_key(stage)] = max(beyond, self._measured.get(_key(stage), 0))


def _key(stage: Stage) -> _Key:
    """Stages with the same code and sizes need the same workspace. Compiled stages live as long as their compiler."""
    return id(stage.run), stage.input_bytes, stage.output_bytes
