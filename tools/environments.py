"""Makes virtual environments under build/ that have a certain version of PyTorch."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOM_BYTES = 6 << 30
"""What the build for CUDA needs, with all that it brings along."""


def environment(
    folder: Path, python: str | Path, torch: str, packages: Sequence[str], *, pip_args: Sequence[str], instead: str
) -> Path:
    """Make an environment with a version of torch, this checkout and other packages, if it is not there. Return its folder.

    instead: what to do where there is no room for it. Raises SystemExit then, and if pip cannot install something.
    """
    if (folder / ".ready").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < ROOM_BYTES:
        raise SystemExit(
            f"{folder.parent} has {free:,} bytes free, the CUDA build of torch {torch} needs {ROOM_BYTES:,}: "
            f"make room there, or {instead}"
        )
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--no-compile", *pip_args]
    for wanted in ([f"torch=={torch}"], ["-e", str(ROOT), *packages]):
        if subprocess.run([*pip, *wanted], check=False).returncode:
            raise SystemExit(f"pip cannot install {' '.join(wanted)}: see above; PIP_ARGS=... names another index")
    (folder / ".ready").touch()
    return folder
