"""Iterations as curves in TensorBoard."""

from __future__ import annotations

import os
from typing import Any

from planner.errors import UnsupportedError
from teraio.watching.stats import IterationStats


class TensorBoardWriter:
    """Writes each iteration to TensorBoard as curves under `teraio/`, for `teraio.on_iteration`.

    folder: as for `torch.utils.tensorboard.SummaryWriter`. Raises UnsupportedError if the package tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UnsupportedError(
                f"TensorBoardWriter needs the package tensorboard ({error}): pip install tensorboard, or use teraio.CsvWriter"
            ) from error
        self._writer: Any = SummaryWriter(os.fspath(folder))

    def __call__(self, stats: IterationStats) -> None:
        """Write one iteration."""
        for name, value in _curves(stats).items():
            self._writer.add_scalar(f"teraio/{name}", value, stats.iteration)

    def close(self) -> None:
        """Write what is left and close the files."""
        self._writer.close()


def _curves(stats: IterationStats) -> dict[str, float]:
    run = f"run {stats.run}/" if stats.run else ""
    curves = {
        "seconds": stats.seconds,
        "waited seconds": stats.waited_seconds,
        "recompute seconds": stats.recompute_seconds,
        **({} if stats.predicted_seconds is None else {"predicted seconds": stats.predicted_seconds}),
        **{f"{tier} bytes": value for tier, value in stats.tier_bytes.items()},
    }
    for link, moved in stats.moved_bytes.items():
        curves[f"{_readable(link)} bytes"] = moved
        rate = stats.bytes_per_second(link)
        if rate is not None:
            curves[f"{_readable(link)} bytes per second"] = rate
    return {f"{run}{name}": float(value) for name, value in curves.items()}


def _readable(link: str) -> str:
    return link.replace("->", " to ")
