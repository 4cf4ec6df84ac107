"""The host's processor in a replay: one update at a time, see [Note: updates on the host] in `planner.problem.host_updates`."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Any

from planner.schema import Trace
from planner.simulator.program import ReplayProgram
from planner.simulator.timeline import HostUpdate

__all__ = ["HostProcessor"]


class HostProcessor:
    """The queue of updates, and the update that runs.

    `landed`: gradients that have been copied out and are not yet consumed. `stale`: parameters that wait for their update.
    `event`: when the update under way ends; infinite if there is none.
    """

    def __init__(self, source: Trace, program: ReplayProgram) -> None:
        self._source, self._program = source, program
        self._queue: deque[tuple[int, float]] = deque()
        self._active: tuple[int, float, float] | None = None  # subgroup, when it was queued, when it began
        self.landed: set[int] = set()
        self.stale: set[int] = set()
        self.event = inf

    @property
    def idle(self) -> bool:
        """Whether no update is queued or under way."""
        return self._active is None and not self._queue

    def standing(self, now: float) -> tuple[tuple[Any, ...], tuple[float, ...]]:
        """Return what waits and runs, and its times from `now` on."""
        under_way = [self._active[:1] if self._active else None, *(subgroup for subgroup, _ in self._queue)]
        times = [queued - now for _, queued in self._queue]
        if self._active:
            times += [time - now for time in (*self._active[1:], self.event)]
        return (under_way, set(self.landed), set(self.stale)), tuple(times)

    def add(self, subgroup: int, now: float) -> None:
        """Queue an update."""
        self._queue.append((subgroup, now))

    def begin(self, now: float) -> None:
        """Begin the head of the queue, if no update runs and its gradients are there."""
        if self._active is None and self._queue and self._program.gradients[self._queue[0][0]] <= self.landed:
            subgroup, queued = self._queue.popleft()
            self._active = (subgroup, queued, now)
            self.event = now + (self._source.subgroups[subgroup].host_seconds or 0.0)

    def end(self, origin: float) -> HostUpdate:
        """End the update under way, and return it. Its times count from `origin`."""
        assert self._active is not None  # `event` was finite
        subgroup, queued, began = self._active
        done = HostUpdate(
            subgroup=subgroup,
            queued_seconds=queued - origin,
            start_seconds=began - origin,
            end_seconds=self.event - origin,
        )
        self._active, self.event = None, inf
        self.landed -= self._program.gradients[subgroup]
        self.stale -= self._program.parameters[subgroup]
        return done
