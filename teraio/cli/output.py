"""What a command gives: a file that it writes, and tables or JSON on standard output."""

from __future__ import annotations

import json
from pathlib import Path

import planner
from planner.schema import FrozenModel
from teraio.cli.tables import Page, show, write_out


def save(made: planner.Plan | planner.Trace, path: Path) -> None:
    """Write a plan or a trace to a file. Raises TeraioError if that cannot be written."""
    try:
        made.save(path)
    except OSError as error:
        raise planner.TeraioError(f"{path}: cannot be written: {error.strerror}") from error


def show_or_print(model: FrozenModel, page: Page, *, as_json: bool) -> None:
    """Print the model as JSON if that is asked for, else the tables that show it. Raises as `write_out` does."""
    if as_json:
        write_out(json.dumps(model.model_dump(mode="json", by_alias=True), indent=1))
    else:
        show(page)
