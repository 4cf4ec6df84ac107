"""Compile the C++ functions for a wheel. Hatchling, which builds it, runs this; see the section of pyproject.toml that names it.

Each file that needs PyTorch's headers is compiled for the PyTorch of the environment that builds, and for those whose folders
the environment variable TORCHES lists, separated by blanks (`make wheel TORCHES="..."`). An editable installation gets no
libraries, nor does a build without a compiler, whose wheel is then for every system. What is not in the wheel is compiled at its
first use. Which file needs what, and how it is compiled, says `runtime/system/compilation.py`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def torch_folders() -> list[Path]:
    """Return the folders of the PyTorchs to compile for, each with its `include`, `lib` and `version.py`."""
    found = importlib.util.find_spec("torch")
    installed = [Path(found.origin).parent] if found is not None and found.origin is not None else []
    return [*installed, *map(Path, os.environ.get("TORCHES", "").split())]


def version_of(torch_folder: Path) -> str:
    """Return a PyTorch's version without importing it."""
    file = torch_folder / "version.py"
    match = re.search(r"^__version__ = '(.+)'$", file.read_text() if file.exists() else "", re.MULTILINE)
    if match is None:
        raise ValueError(f"{file} has no version of PyTorch; let TORCHES list folders such as site-packages/torch")
    return match[1]


def libraries(root: Path, torches: list[Path], output: Path) -> dict[str, str]:
    """Compile the C++ files of the package `runtime` below `root` into `output`. Return the places in the wheel, by library."""
    compilation = runpy.run_path(str(root / "runtime" / "system" / "compilation.py"))
    made: dict[str, str] = {}
    for source in sorted((root / "runtime").rglob("*.cpp")):
        for torch_folder in [None, *torches]:
            name = compilation["shipped_name"](source, version_of(torch_folder) if torch_folder else "")
            place = str(source.with_name(name).relative_to(root)) if name else None
            if place is None or place in made.values():
                continue
            library = output / name
            compilation["compile_library"](compilation["command"](source, library, torch_folder))
            made[str(library)] = place
    return made


class WheelHook(BuildHookInterface[Any]):
    """Adds the libraries to the wheel, which is then for this system and processor and for every Python. Hatchling calls it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile them."""
        self._output = tempfile.TemporaryDirectory(prefix="teraio-wheel-")
        if version == "editable":
            return
        try:
            made = libraries(Path(self.root), torch_folders(), Path(self._output.name))
        except OSError as error:
            self.app.display_warning(f"the wheel gets no libraries, they are compiled at the first use: {error}")
            return
        build_data["force_include"].update(made)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{re.sub('[^a-z0-9_]', '_', sysconfig.get_platform())}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what the wheel has a copy of."""
        self._output.cleanup()
