"""What a run measured, to stand beside what its plan predicts."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence

from planner.errors import FileFormatError
from planner.schema import FrozenModel
from teraio.watching import IterationStats, read_csv

__all__ = ["MeasuredRun"]


class MeasuredRun(FrozenModel):
    """The latest run in a file of `teraio.CsvWriter`: medians over the iterations that followed a plan.

    planned, iterations: how many did, and how many there are. predicted_seconds: by the plan that the last of them followed.
    moved_bytes, busy_seconds: of an iteration, by link. If none followed a plan, all figures are None or empty.
    """

    planned: int
    iterations: int
    predicted_seconds: float | None = None
    seconds: float | None = None
    waited_seconds: float | None = None
    recompute_seconds: float | None = None
    moved_bytes: dict[str, float] = {}
    busy_seconds: dict[str, float] = {}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> MeasuredRun:
        """Read the file. Raises FileFormatError with the file, the line and what is wrong."""
        found = read_csv(path)
        if not found:
            raise FileFormatError(f"{path}: no iteration is in it; give the file of a run that has ended some")
        last = max(each.run for each in found)
        return cls.of([each for each in found if each.run == last])

    @classmethod
    def of(cls, iterations: Sequence[IterationStats]) -> MeasuredRun:
        """Return the medians over these iterations of one run."""
        planned = [each for each in iterations if each.phase == "planned"]
        if not planned:
            return cls(planned=0, iterations=len(iterations))
        links = dict.fromkeys(link for each in planned for link in each.moved_bytes)
        return cls(
            planned=len(planned),
            iterations=len(iterations),
            predicted_seconds=planned[-1].predicted_seconds,
            seconds=statistics.median(each.seconds for each in planned),
            waited_seconds=statistics.median(each.waited_seconds for each in planned),
            recompute_seconds=statistics.median(each.recompute_seconds for each in planned),
            moved_bytes={link: statistics.median(each.moved_bytes.get(link, 0) for each in planned) for link in links},
            busy_seconds={link: statistics.median(each.busy_seconds.get(link, 0.0) for each in planned) for link in links},
        )
