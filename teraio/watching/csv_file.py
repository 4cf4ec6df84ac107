"""Iterations in a CSV file, one line each. The columns are described in `docs/architecture.md`."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import TextIO, get_args

from planner.errors import FileFormatError
from teraio.status import RunPhase
from teraio.watching.stats import LINKS, TIERS, IterationStats

COLUMNS = (
    "run",
    "iteration",
    "phase",
    "seconds",
    "waited_seconds",
    "recompute_seconds",
    "predicted_seconds",
    *(f"{tier}_bytes" for tier in TIERS),
    *(f"{link} bytes" for link in LINKS),
    *(f"{link} busy_seconds" for link in LINKS),
)


class CsvWriter:
    """Writes each iteration as a line of a CSV file, for `teraio.on_iteration`.

    path: is replaced if it exists. Each line is in the file as soon as its iteration has ended. Raises OSError.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file: TextIO = Path(path).open("w", newline="", encoding="utf-8", buffering=1)
        self._rows = csv.writer(self._file)
        self._rows.writerow(COLUMNS)

    def __call__(self, stats: IterationStats) -> None:
        """Write one iteration."""
        self._rows.writerow(
            [
                stats.run,
                stats.iteration,
                stats.phase,
                stats.seconds,
                stats.waited_seconds,
                stats.recompute_seconds,
                "" if stats.predicted_seconds is None else stats.predicted_seconds,
                *(stats.tier_bytes.get(tier, "") for tier in TIERS),
                *(stats.moved_bytes.get(link, "") for link in LINKS),
                *(stats.busy_seconds.get(link, "") for link in LINKS),
            ]
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_csv(path: str | os.PathLike[str]) -> tuple[IterationStats, ...]:
    """Return the iterations of a file that `CsvWriter` wrote. A last line that was cut short is left out.

    Raises FileFormatError with the file, the line and what is wrong.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            lines = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FileFormatError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not lines or tuple(lines[0]) != COLUMNS:
        raise FileFormatError(f"{path}: line 1 has not the columns of measured iterations; write the file by teraio.CsvWriter")
    if len(lines) > 1 and len(lines[-1]) < len(COLUMNS):
        lines.pop()  # the training was killed
    return tuple(_parsed(path, number, values) for number, values in enumerate(lines[1:], start=2))


def _parsed(path: str | os.PathLike[str], number: int, values: list[str]) -> IterationStats:
    try:
        given = dict(zip(COLUMNS, values, strict=True))
        phase = next(name for name in get_args(RunPhase) if name == given["phase"])
        return IterationStats(
            run=int(given["run"]),
            iteration=int(given["iteration"]),
            phase=phase,
            seconds=float(given["seconds"]),
            waited_seconds=float(given["waited_seconds"]),
            recompute_seconds=float(given["recompute_seconds"]),
            predicted_seconds=float(given["predicted_seconds"]) if given["predicted_seconds"] else None,
            tier_bytes={tier: int(given[f"{tier}_bytes"]) for tier in TIERS if given[f"{tier}_bytes"]},
            moved_bytes={link: int(given[f"{link} bytes"]) for link in LINKS if given[f"{link} bytes"]},
            busy_seconds={link: float(given[f"{link} busy_seconds"]) for link in LINKS if given[f"{link} busy_seconds"]},
        )
    except (ValueError, StopIteration) as error:
        raise FileFormatError(f"{path}: line {number} is no measured iteration: {str(error) or 'no such phase'}") from error
