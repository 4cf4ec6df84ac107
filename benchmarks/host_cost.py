"""What management costs the host: iterations that compute and copy nothing, on a device on which nothing is done.

Two layers: the pager alone, and all that a call of a compiled graph goes through (executor, recorder and pager). A stage costs
what it costs where nothing moves; what an iteration with moves takes beyond that is the cost of its moves.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from statistics import median

from benchmarks.idle_device import IdleDevice
from benchmarks.idle_stages import IdleStages
from benchmarks.idle_training import STAGES, IdleTraining
from benchmarks.results import Figure

BLOCKS = (500, 2_000, 8_000)
"""Numbers of blocks. The costs should not depend on them."""
USUAL_BLOCKS = 2_000
_WARM_UP = 3

Measured = tuple[tuple[Figure, ...], dict[str, list[float]]]


def measure(rounds: int) -> Measured:
    """Return the costs of a stage, of a move and of an iteration, for each number of blocks. rounds: 5 iterations for each."""
    figures: list[Figure] = []
    samples: dict[str, list[float]] = {}
    for layer, kind in (("pager", IdleStages), ("whole path", IdleTraining)):
        for blocks in BLOCKS:
            figures += measure_one(layer, kind, blocks, 5 * rounds, samples)
    return tuple(figures), samples


def measure_one(
    layer: str, kind: type[IdleStages] | type[IdleTraining], blocks: int, iterations: int, samples: dict[str, list[float]]
) -> list[Figure]:
    name = f"{layer}, {blocks:,} blocks"
    resting, moving = kind(blocks, moving=False), kind(blocks)
    device = moving.pager.device
    assert isinstance(device, IdleDevice)
    try:
        still, _ = _times(f"{name}, nothing moves", resting.iterate, iterations, samples)
        plain = 0.0
        if isinstance(moving, IdleTraining):
            plain, _ = _times(f"{name}, unmanaged", moving.iterate_plainly, iterations, samples)
        evictions, calls = moving.pager.account.evictions, device.calls
        busy, wall = _times(name, moving.iterate, iterations, samples)
        runs = _WARM_UP + iterations
        moves, calls = (moving.pager.account.evictions - evictions) / runs, (device.calls - calls) // runs
    finally:
        resting.close()
        moving.close()
    aimed = blocks == USUAL_BLOCKS and layer == "whole path"
    note = f"{len(moving.moves):,} planned; {calls:,} calls for the device an iteration"
    return [
        Figure(name=f"{name}: a stage", value=1e6 * (still - plain) / STAGES, unit="µs", aim="<= 60" if aimed else ""),
        Figure(name="a move", value=1e6 * (busy - still) / moves, unit="µs", aim="<= 15" if aimed else "", note=note),
        Figure(
            name="an iteration",
            value=1e3 * (busy - plain),
            unit="ms",
            aim="<= 40" if aimed else "",
            note=f"processor time; {1e3 * (wall - plain):.1f} ms by the clock, {moves:,.0f} moves, load {os.getloadavg()[0]:.1f}",
        ),
    ]


def _times(name: str, iterate: Callable[[], None], iterations: int, samples: dict[str, list[float]]) -> tuple[float, float]:
    """Return the medians of the processor seconds and of the seconds by the clock that an iteration takes."""
    for _ in range(_WARM_UP):
        iterate()
    gc.collect()
    busy, wall = [], []
    for _ in range(iterations):
        began = time.process_time(), time.perf_counter()
        iterate()
        busy.append(time.process_time() - began[0])
        wall.append(time.perf_counter() - began[1])
    samples[name], samples[f"{name}, by the clock"] = busy, wall
    return median(busy), median(wall)
