"""How long stages take when nothing else disturbs the machine, from the times of several iterations. Pure: reads no clock.

[Note: Disturbed iterations]
Another program on the same machine makes some stages of some iterations slower, and none faster. So a stage's time is the median
of those measurements that are near the fastest one: as precise as a median, but it stays right if most iterations were disturbed.
The time of user code is the median of all, since user code does not do the same in each iteration.

A fastest measurement that no other one confirms may itself be disturbed. If too much of the time is in such stages, more
iterations are profiled. A disturbance that lasts through all of them shows only later, see [Note: Planning again] in
`teraio.planning.follower`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from teraio.profiling.iteration import Iteration

_NEAR = 1.5
"""Measurements up to this multiple of the fastest one count as undisturbed."""
_UNSURE = 0.1
"""Share of the time that may be in stages with a single undisturbed measurement."""
_ENOUGH_TO_JUDGE = 3
"""With fewer iterations, whoever has asked for so few gets what they say."""


def stage_seconds(iterations: Sequence[Iteration]) -> list[float]:
    """Return the seconds of each stage while nothing disturbs it, by position. The iterations must have equal signatures."""
    return [statistics.median(times if phase == "user" else _undisturbed(times)) for phase, times in _measurements(iterations)]


def times_agree(iterations: Sequence[Iteration]) -> bool:
    """Return whether at least two of the iterations agree about most of the time that compiled stages and updates take."""
    if len(iterations) < _ENOUGH_TO_JUDGE:
        return True
    stages = [times for phase, times in _measurements(iterations) if phase != "user"]
    typical = [statistics.median(times) for times in stages]
    unsure = sum(seconds for seconds, times in zip(typical, stages, strict=True) if len(_undisturbed(times)) < 2)
    return unsure <= _UNSURE * sum(typical)


def _undisturbed(times: Sequence[float]) -> list[float]:
    fastest = min(times)
    return [seconds for seconds in times if seconds <= max(fastest, _NEAR * fastest)]  # a coarse clock may go back


def _measurements(iterations: Sequence[Iteration]) -> list[tuple[str, list[float]]]:
    """Return the phase of each stage with its seconds in each iteration, by position."""
    runs = zip(*(iteration.stages for iteration in iterations), strict=True)
    return [(stages[0].phase, [stage.seconds for stage in stages]) for stages in runs]
