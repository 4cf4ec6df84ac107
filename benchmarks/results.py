"""Results of benchmarks: figures with their aims, as a table and as a JSON file."""

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
from pydantic import BaseModel, ConfigDict
from rich.table import Table

PACKAGES = ("teraio", "torch", "numpy", "pulp", "highspy")
IF_INSTALLED = ("triton", "kvikio-cu12", "kvikio-cu13")


class Figure(BaseModel):
    """One measured number. `aim`: what it should be ("<= 1.03", ">= 0.90"), or empty."""

    model_config = ConfigDict(frozen=True)

    name: str
    value: float | None
    unit: str
    aim: str = ""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the value reaches the aim; None without a value or an aim."""
        if self.value is None or not self.aim:
            return None
        relation, limit = self.aim.split()
        return self.value <= float(limit) if relation == "<=" else self.value >= float(limit)


class Result(BaseModel):
    """The figures of one part, and the raw numbers behind them."""

    model_config = ConfigDict(frozen=True)

    part: str
    seconds: float
    figures: tuple[Figure, ...]
    samples: dict[str, list[float]] = {}
    settings: dict[str, Any] = {}


def table(results: Sequence[Result]) -> Table:
    """Return a table of all figures of all parts."""
    shown = Table(title="teraio benchmark")
    for heading in ("part", "figure", "value", "aim", "met", "note"):
        shown.add_column(heading, justify="right" if heading == "value" else "left")
    words = {None: "", True: "[green]yes[/green]", False: "[red]no[/red]"}
    for result in results:
        for index, figure in enumerate(result.figures):
            last = index == len(result.figures) - 1
            value = "-" if figure.value is None else f"{figure.value:,.4g} {figure.unit}".strip()
            part = result.part if index == 0 else ""
            cells = (part, figure.name, value, figure.aim, words[figure.met], figure.note)
            shown.add_row(*cells, end_section=last)
    return shown


def save(results: Sequence[Result], folder: Path, device: str) -> Path:
    """Write `<date>-<machine>-<parts>.json` into `folder` and return its path. Earlier files stay."""
    now = datetime.now(UTC)
    parts = "-".join(result.part for result in results)
    machine = f"{_processor_name()}x{psutil.cpu_count()}" if device == "cpu" else torch.cuda.get_device_name()
    name = "".join(letter if letter.isalnum() else "_" for letter in machine).strip("_").lower()
    content = {
        "format": "teraio.benchmark",
        "version": 1,
        "measured_at": now.isoformat(timespec="seconds"),
        "command": ["python", "-m", "benchmarks", *sys.argv[1:]],
        "machine": {
            "name": machine,
            "cores": psutil.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "system": platform.platform(),
            "device": device,
            **(_gpu() if device == "cuda" else {}),
        },
        "versions": versions(),
        "results": [result.model_dump() for result in results],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{now:%Y-%m-%dT%H%M%S}-{name}-{parts}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that figures depend on."""
    found = {"python": platform.python_version()} | {package: version(package) for package in PACKAGES}
    for package in IF_INSTALLED:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    drivers = []
    if shutil.which(query[0]):
        drivers = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    return {
        "gpu": properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "driver": drivers[0] if drivers else None,
    }


def _processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
