"""A plan's memory and timeline as a picture. Needs matplotlib, which teraio installs only as an extra."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from planner.errors import OptionsError
from teraio.cli.report.timeline import MemoryRows, TimelineRows

__all__ = ["draw"]

COLOURS = {
    "parameter": "#0072b2",
    "gradient": "#e69f00",
    "optimizer_state": "#009e73",
    "activation": "#cc79a7",
    "buffer": "#8c8c8c",
    "workspace": "#56b4e9",
}
_PHASES = {
    "forward": "#0072b2",
    "backward": "#cc79a7",
    "optimizer": "#009e73",
    "user": "#8c8c8c",
    "recompute": "#e69f00",
}
_STALL = "#d55e00"
_GIB = 1 << 30


def draw(title: str, rows: TimelineRows, path: str | os.PathLike[str]) -> None:
    """Write a picture of the memory without and with the plan, and of the lanes. Raises OptionsError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionsError(f"option --png needs matplotlib ({error}); install it: pip install 'teraio[plot]'") from error
    figure = Figure(figsize=(12, 9), layout="constrained")
    FigureCanvasAgg(figure)
    without, planned, lanes = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": (2, 2, 1.5)})
    figure.suptitle(title)
    for axes, memory, name in ((without, rows.unplanned, "nothing moves"), (planned, rows.memory, "with the plan")):
        _stack(axes, memory, rows.budget_bytes, name)
    planned.legend(loc="upper left", fontsize="small", ncols=4)
    _lanes(lanes, rows)
    figure.savefig(path, format="png", dpi=120)


def _stack(axes: Any, memory: MemoryRows, budget_bytes: int, name: str) -> None:
    times = [*(point[0] for point in memory.points), memory.seconds]
    columns = [[point[column] / _GIB for point in memory.points] for column in range(1, len(memory.kinds) + 1)]
    sizes = [[*column, column[-1]] for column in columns]
    axes.stackplot(times, sizes, step="post", labels=memory.kinds, colors=[COLOURS[kind] for kind in memory.kinds])
    axes.axhline(budget_bytes / _GIB, color="black", linestyle="--", linewidth=1)
    axes.set_title(f"device memory, {name} (dashed: the budget)", fontsize="medium")
    axes.set_ylabel("GiB")


def _lanes(axes: Any, rows: TimelineRows) -> None:
    names = ["compute", *rows.links, *(["updates on the host"] if rows.updates else [])]
    for phase, colour in _PHASES.items():
        _bars(axes, 0, ((stage.start, stage.end) for stage in rows.stages if stage.phase == phase), colour)
    _bars(axes, 0, ((stage.reached, stage.start) for stage in rows.stages), _STALL)
    for lane, link in enumerate(rows.links, 1):
        _bars(axes, lane, ((copy.start, copy.end) for copy in rows.copies if copy.link == link), "#56b4e9")
    _bars(axes, len(names) - 1, ((update.start, update.end) for update in rows.updates), "#009e73")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, max(rows.seconds, rows.unplanned.seconds))
    axes.set_xlabel("seconds (stalls are red)")


def _bars(axes: Any, lane: int, spans: Iterable[tuple[float, float]], colour: str) -> None:
    axes.broken_barh([(start, end - start) for start, end in spans if end > start], (lane - 0.4, 0.8), color=colour)
