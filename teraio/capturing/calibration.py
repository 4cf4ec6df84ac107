"""Fits the efficiencies of a machine to a measured trace, so that captures for that machine have measured speed.

The measured training is captured too, which gives the kernels of each stage. The fit is over the two classes of kernels: those
that are bound by arithmetic (matmuls, convolutions, attention) and those that are bound by memory traffic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner import Trace
from planner.errors import OptionsError
from teraio.capturing.hardware import MachineDescription
from teraio.stages import Kernel

__all__ = ["calibrated", "matched"]

Measured = tuple[float, Sequence[Kernel]]
"""A stage: the seconds that it took, and its kernels."""

_PHASES = ("forward", "backward")
_GRID = 41
_ROUNDS = 6
_WIDEST = 1000.0
"""Efficiencies are looked for from 1 / _WIDEST to _WIDEST of the given ones."""


def matched(captured: Trace, executed: Sequence[Sequence[Kernel]], measured: Trace) -> list[Measured]:
    """Return the stages of compiled graphs that both traces have, by name.

    executed: the kernels of these stages of `captured`, in order. Raises OptionsError if most stages of `measured` are not found.
    """
    work: dict[str, list[Sequence[Kernel]]] = {}
    names = [stage.name for stage in captured.stages if stage.phase in _PHASES]
    for name, kernels in zip(names, executed[-len(names) :], strict=True):
        work.setdefault(name, []).append(kernels)
    wanted = [stage for stage in measured.stages if stage.phase in _PHASES]
    found = [(stage.duration_seconds, work[stage.name].pop(0)) for stage in wanted if work.get(stage.name)]
    if not wanted or 2 * len(found) < len(wanted):
        raise OptionsError(
            f"calibrate: the trace {measured.name!r} has {len(wanted)} stages of compiled graphs, and the training that was "
            f"captured for it has {len(found)} of them; give the training (smaller) that this trace was measured in"
        )
    return found


def calibrated(description: MachineDescription, stages: Sequence[Measured]) -> MachineDescription:
    """Return the machine with the efficiencies that fit best: the sum of |estimated − measured| seconds is least.

    An efficiency of more than 1 means that the peak was too low: the peak is raised, and the efficiency is 1.
    """
    fit = _Fit(description, stages)
    arithmetic, traffic = fit.best()
    peak, rate = max(description.matmul_efficiency * arithmetic, 1.0), max(description.memory_efficiency * traffic, 1.0)
    return description.model_copy(
        update={
            "matmul_efficiency": min(description.matmul_efficiency * arithmetic, 1.0),
            "memory_efficiency": min(description.memory_efficiency * traffic, 1.0),
            "flops_per_second": {name: value * peak for name, value in description.flops_per_second.items()},
            "memory_bytes_per_second": description.memory_bytes_per_second * rate,
            "sources": f"{description.sources} Efficiencies: fitted to {len(stages)} measured stages.".strip(),
        }
    )


class _Fit:
    """The estimated seconds of all stages as a function of two factors on the two efficiencies."""

    def __init__(self, description: MachineDescription, stages: Sequence[Measured]) -> None:
        kernels = [kernel for _, work in stages for kernel in work]
        costs = [description.costs(kernel) for kernel in kernels]
        self._arithmetic = np.array([cost[0] for cost in costs])
        self._traffic = np.array([cost[1] for cost in costs])
        self._launch = description.launch_seconds
        self._stage = np.repeat(np.arange(len(stages)), [len(work) for _, work in stages])
        self._measured = np.array([seconds for seconds, _ in stages])

    def best(self) -> tuple[float, float]:
        """Return the factors: a grid over both, and then finer grids around the best point."""
        arithmetic = traffic = 1.0
        width = _WIDEST
        for _ in range(_ROUNDS):
            steps = np.geomspace(1 / width, width, _GRID)
            tried = [(arithmetic * one, traffic * other) for one in steps for other in steps]
            arithmetic, traffic = min(tried, key=self._error)
            width = float(steps[_GRID // 2 + 1]) ** 2  # two steps to each side
        return float(arithmetic), float(traffic)

    def _error(self, factors: tuple[float, float]) -> float:
        seconds = np.maximum(np.maximum(self._arithmetic / factors[0], self._traffic / factors[1]), self._launch)
        estimated = np.bincount(self._stage, weights=seconds, minlength=len(self._measured))
        return float(np.abs(estimated - self._measured).sum())
