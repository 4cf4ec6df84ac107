"""Make a folder for PYTHONPATH that replaces `pip install -e .` where nothing can be downloaded.

python -m tools.site_folder FOLDER [WHEELS]

The folder gets the metadata of teraio, by which torch finds the backend, and the unpacked wheels of WHEELS. Fails with a list if
a dependency is still missing.
"""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from tools.gpu_wheels import is_installed, name_of
from tools.gpu_wheels import wheels as listed


def write_metadata(folder: Path, project: dict[str, Any]) -> None:
    """Write the `.dist-info` of `project` (a table of pyproject.toml) into `folder`."""
    metadata = folder / f"{project['name']}-{project['version']}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    header = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (metadata / "METADATA").write_text(header)
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")


def missing(requirements: list[str]) -> list[str]:
    """Return the requirements of which no version is installed."""
    return [requirement for requirement in requirements if not is_installed(name_of(requirement))]


def main(folder: Path, wheels: Path | None) -> int:
    """Fill `folder`. Return 1 if dependencies are missing, otherwise 0."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    if wheels is not None:
        found = sorted(str(path) for path in wheels.glob("*.whl"))
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--upgrade"]
        subprocess.run([*pip, "--target", str(folder), *found], check=True)
    write_metadata(folder, project)
    sys.path.insert(0, str(folder))
    indirect = [wheel.requirement for wheel in listed() if wheel.part == "teraio"]
    needed = dict.fromkeys([*project["dependencies"], *indirect, "pytest>=8.3", "pytest-timeout>=2.3", "hypothesis>=6.120"])
    if absent := missing(list(needed)):
        print(
            f"{sys.executable} lacks {', '.join(absent)}.\n"
            "Install them, or put their wheels in a folder and name it: make ... NO_VENV=1 WHEELS=folder",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None))
