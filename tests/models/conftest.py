"""Fixtures of the tests with real models, and the file that tells what they found (`--models-out`)."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from ..teraio.conftest import finely_cut, fresh_process_state, one_compute_thread, planning_in_process, quick_links
from ..teraio.parity.conftest import fine_and_quick, on_one_thread
from .torchvision_import import make_importable

make_importable()  # before anything imports transformers

__all__ = [
    "fine_and_quick",
    "finely_cut",
    "fresh_process_state",
    "on_one_thread",
    "one_compute_thread",
    "planning_in_process",
    "quick_links",
]
PACKAGES = ("torch", "transformers", "timm", "diffusers", "peft", "safetensors", "torchao", "lightning", "trl")

_found: dict[tuple[str, ...], dict[str, Any] | None] = {}
"""By kind, model and code what the tests found, as they recorded it ("row" and "facts"); None where they failed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--models-out", type=Path, help="this JSON file is to hold what the tests of real models find")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    recorded: dict[str, Any] = dict(report.user_properties)
    if report.when == "call" and "row" in recorded:
        _found[tuple(recorded["row"])] = recorded.get("facts")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Replace the rows of the tests that ran, or remove them; a worker of pytest-xdist reports to another process."""
    path: Path | None = session.config.getoption("--models-out", default=None)
    if path is None or hasattr(session.config, "workerinput"):
        return
    before = json.loads(path.read_text())["results"] if path.exists() else []
    rows = {(row["kind"], row["model"], row["codegen"]): row for row in before} | _found
    versions = {name: version for name in PACKAGES if (version := _version(name)) is not None}
    found = {"versions": versions, "results": [row for row in rows.values() if row is not None]}
    path.write_text(json.dumps(found, indent=1) + "\n")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
