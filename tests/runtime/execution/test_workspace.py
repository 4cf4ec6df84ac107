"""How much memory a stage needs: estimated, then measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from runtime.cpu import CpuMemory
from runtime.execution import WorkspaceMeter, run_managed

from ..memory_mover import Bench
from .programs import MIB, WIDTH, Recorder, filled, program, stage


def temporary(count: int) -> Callable[..., tuple[torch.Tensor]]:
    def run(values: list[Any]) -> tuple[torch.Tensor]:
        source = values.pop()
        others = [source + 1 for _ in range(count)]
        return (others[0] * 2,)

    return run


def test_a_workspace_is_measured() -> None:
    meter = WorkspaceMeter(CpuMemory())
    base = stage("x", lambda a: (a,), (0,), (1,))
    big = replace(base, run=temporary(3), output_bytes=MIB, workspace_bytes=7)
    assert meter.workspace_bytes(big) == 7
    source = torch.ones(MIB // 4)
    with meter.watching(big):
        big.run([source])
    assert 3 * MIB <= meter.workspace_bytes(big) < 3 * MIB + MIB // 16, "the copies, and what the allocator adds"
    with meter.watching(big):
        big.run([torch.ones(1)])
    assert meter.workspace_bytes(big) >= 3 * MIB, "the largest counts"


class Counter:
    """An allocator that has nothing allocated, and a peak that a test says."""

    allocated_bytes = 0
    peak_bytes = 0

    def reset_peak(self) -> None:
        pass


def test_what_only_the_first_run_needs_does_not_count() -> None:
    """Nor is the peak forgotten before it: Inductor tunes kernels within the memory below it."""
    memory, resets = Counter(), []
    memory.reset_peak = lambda: resets.append(len(seen))  # type: ignore[method-assign]
    meter = WorkspaceMeter(memory, runs=4, first_is_special=True)
    base = replace(stage("x", lambda a: (a,), (0,), (1,)), output_bytes=0, workspace_bytes=7)
    seen: list[int] = []
    for memory.peak_bytes in (900, 100, 300, 200, 999):
        with meter.watching(base):
            pass
        seen.append(meter.workspace_bytes(base))
    assert seen == [7, 100, 300, 300, 300], "the estimate, then the largest; after four runs none is measured"
    assert resets == [1, 2, 3]


def test_a_run_that_fails_is_measured_again_in_the_same_iteration() -> None:
    memory = Counter()
    meter = WorkspaceMeter(memory, runs=4, iteration=lambda: 0)
    base = replace(stage("x", lambda a: (a,), (0,), (1,)), output_bytes=0, workspace_bytes=7)
    with pytest.raises(torch.OutOfMemoryError), meter.watching(base):
        raise torch.OutOfMemoryError
    memory.peak_bytes = 300
    with meter.watching(base):
        pass
    assert meter.workspace_bytes(base) == 300


def test_the_runs_that_are_measured_are_spread_over_iterations() -> None:
    """Like layers share a stage: all runs that are measured would be in the first iteration otherwise."""
    memory, iteration = Counter(), 0
    meter = WorkspaceMeter(memory, runs=4, first_is_special=True, iteration=lambda: iteration)
    base = replace(stage("x", lambda a: (a,), (0,), (1,)), output_bytes=0)
    seen = []
    for peaks in ((900, 100, 500), (200, 999), (300, 999), (800, 999)):
        for memory.peak_bytes in peaks:
            with meter.watching(base):
                pass
        seen.append(meter.workspace_bytes(base))
        iteration += 1
    assert seen == [100, 200, 300, 300], "the first two runs, then the first of each iteration; four in all"


def test_a_run_during_which_blocks_have_moved_measures_nothing() -> None:
    memory, moves = Counter(), 0
    meter = WorkspaceMeter(memory, runs=2, moves=lambda: moves)
    base = replace(stage("x", lambda a: (a,), (0,), (1,)), output_bytes=0, workspace_bytes=7)
    seen = []
    for memory.peak_bytes, moved in ((900, 1), (100, 0), (700, 2), (300, 0), (999, 0)):
        with meter.watching(base):
            moves += moved
        seen.append(meter.workspace_bytes(base))
    assert seen == [7, 100, 100, 300, 300], "two runs count, of those in which nothing else has happened"


def test_without_a_measurement_the_estimate_stays() -> None:
    meter = WorkspaceMeter(None)
    base = stage("x", lambda a: (a,), (0,), (1,))
    with meter.watching(base):
        base.run([torch.ones(WIDTH)])
    assert meter.workspace_bytes(base) == base.workspace_bytes


def test_a_workspace_does_not_depend_on_who_else_holds_the_inputs() -> None:
    """The same code runs for several stages: one frees its input while it runs, the next one's input lives on."""

    def run(values: list[Any]) -> tuple[torch.Tensor]:
        once = values.pop() * 1
        return (once * 2,)

    base = stage("x", lambda a: (a,), (0,), (1,), frees=(0,))
    freeing = replace(base, run=run)
    plan = program(freeing, inputs=1, results=(1,))
    meter = WorkspaceMeter(CpuMemory())
    run_managed(plan, [filled(1)], Bench(None).pager, Recorder(), meter)
    assert meter.workspace_bytes(freeing) >= WIDTH
