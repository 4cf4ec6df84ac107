"""Writes traces and plans to the files that the user named. If that fails, training goes on."""

from __future__ import annotations

import logging
from pathlib import Path

import planner

logger = logging.getLogger("teraio")


def save(file: planner.Trace | planner.Plan, path: Path | None) -> Path | None:
    """Write the file if a path is given. Return the path, or None if nothing was written; a warning then says why."""
    if path is None:
        return None
    try:
        file.save(path)
    except OSError as error:
        what = "trace" if isinstance(file, planner.Trace) else "plan"
        logger.warning("the %s could not be written to %s: %s; training goes on without", what, path, error)
        return None
    return path
