"""Turns the totals of a run into what each iteration took."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from teraio.status import RunPhase
from teraio.watching.stats import IterationStats

if TYPE_CHECKING:  # `import teraio` must not import torch
    from runtime.paging import Pager
    from teraio.machine import Machine
    from teraio.profiling import Iteration

_LENGTH = 1000
"""Iterations that are kept."""


class History:
    """The latest iterations of one run. `note` is for the training thread, `latest` for any."""

    def __init__(self, machine: Machine, pager: Pager) -> None:
        self._machine = machine
        self._pager = pager
        self._moved_bytes: Mapping[str, int] = {}
        self._busy_seconds: Mapping[str, float] = {}
        self._waited_seconds = self._recompute_seconds = 0.0
        self._iterations: deque[IterationStats] = deque(maxlen=_LENGTH)

    @property
    def latest(self) -> tuple[IterationStats, ...]:
        """The iterations, the oldest first."""
        return tuple(self._iterations)

    def note(
        self, iteration: Iteration, phase: RunPhase, predicted_seconds: float | None, *, run: int, number: int
    ) -> IterationStats:
        """Take in an iteration that has ended, and whose times are known.

        run, number: of the run and of the iteration, for `IterationStats`.
        """
        moved_bytes, busy_seconds = self._machine.moved_bytes(), self._machine.busy_seconds()
        if iteration.timed:
            self._waited_seconds = iteration.waited_seconds
            self._recompute_seconds = sum(rerun.seconds for rerun in iteration.reruns)
        stats = IterationStats(
            run=run,
            iteration=number,
            phase=phase,
            seconds=iteration.seconds,
            waited_seconds=self._waited_seconds,
            recompute_seconds=self._recompute_seconds,
            predicted_seconds=predicted_seconds,
            tier_bytes={"device": self._pager.used_bytes + self._pager.unmoved_bytes, **self._machine.used_bytes()},
            moved_bytes={link: value - self._moved_bytes.get(link, 0) for link, value in moved_bytes.items()},
            busy_seconds={link: value - self._busy_seconds.get(link, 0.0) for link, value in busy_seconds.items()},
        )
        self._moved_bytes, self._busy_seconds = moved_bytes, busy_seconds
        self._iterations.append(stats)
        return stats
