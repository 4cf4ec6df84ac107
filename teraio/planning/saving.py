"""Writes traces and plans where the user wants them; training goes on where that fails."""

from __future__ import annotations

import logging
from pathlib import Path

import planner

logger = logging.getLogger("teraio")


def save(file: planner.Trace | planner.Plan, path: Path | None) -> Path | None:
    """Write the file if a path is given. Gives the path if it was written; a warning says why it was not."""
    if path is None:
        return None
    try:
        file.save(path)
    except OSError as error:
        what = "trace" if isinstance(file, planner.Trace) else "plan"
        logger.warning("the %s could not be written to %s: %s; training goes on without", what, path, error)
        return None
    return path
