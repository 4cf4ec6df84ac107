"""Fixtures of the tests with real models, and the file that tells what they found (`--models-out`)."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from ..teraio.conftest import fresh_process_state, one_compute_thread, planning_in_process
from ..teraio.parity.conftest import fine_and_quick, on_one_thread
from .torchvision_import import make_importable

make_importable()  # before anything imports transformers

__all__ = ["fine_and_quick", "fresh_process_state", "on_one_thread", "one_compute_thread", "planning_in_process"]
PACKAGES = ("torch", "transformers", "timm", "diffusers", "peft", "safetensors")

_found: list[dict[str, Any]] = []
"""What the tests recorded as the property "facts"; in the process that reports."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--models-out", type=Path, help="this JSON file is to hold what the tests of real models find")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        _found.extend(value for name, value in report.user_properties if name == "facts")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Update the file, if all tests passed; not in a worker of pytest-xdist, which reports to another process."""
    path: Path | None = session.config.getoption("--models-out", default=None)
    if path is None or exitstatus or hasattr(session.config, "workerinput"):
        return
    before = json.loads(path.read_text())["results"] if path.exists() else []
    results = {(row["kind"], row["model"]): row for row in (*before, *_found)}
    versions = {name: version for name in PACKAGES if (version := _version(name)) is not None}
    path.write_text(json.dumps({"versions": versions, "results": list(results.values())}, indent=1) + "\n")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
