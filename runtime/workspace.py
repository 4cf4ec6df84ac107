"""How much memory a stage needs beyond its inputs and outputs: estimated until it has run once, then measured."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

from runtime.program import Stage

_Key = tuple[int, int, int]


class WorkspaceMeter:
    """Measures every distinct stage when it runs for the first time under management.

    Listens to PyTorch's CPU allocator through the profiler. What libraries allocate by themselves is not seen.
    """

    def __init__(self) -> None:
        self._measured: dict[_Key, int] = {}

    def workspace_bytes(self, stage: Stage) -> int:
        """Bytes beyond inputs and outputs: as measured, or estimated if the stage has not run yet."""
        return self._measured.get(_key(stage), stage.workspace_bytes)

    @contextlib.contextmanager
    def watching(self, stage: Stage) -> Iterator[None]:
        """Around a run of `stage`: measures it if that is not done yet and nobody else is profiling."""
        key = _key(stage)
        if key in self._measured or torch._C._autograd._profiler_enabled():
            yield
            return
        _enable_profiler_legacy(
            ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
        )
        try:
            yield
        finally:
            threads = _disable_profiler_legacy()
        changes = [e.cpu_memory_usage() for events in threads for e in events if str(e.kind()) == "memory_alloc"]
        peak = max(itertools.accumulate(changes), default=0)
        self._measured[key] = max(0, peak - stage.output_bytes)


def _key(stage: Stage) -> _Key:
    """Stages with the same code and sizes need the same workspace. Compiled stages live as long as their compiler."""
    return id(stage.run), stage.input_bytes, stage.output_bytes
