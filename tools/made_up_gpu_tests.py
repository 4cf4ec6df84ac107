"""Run tests/gpu on the made-up GPU, in environments with the CUDA build of PyTorch.

python -m tools.made_up_gpu_tests [--environment FOLDER ...] [--torch VERSION ...] [--pip-args ARGS] [arguments of pytest]

An environment is made under build/ for each version of torch, unless existing ones are named. It takes 4.5 GB. The tests are
those of `tools.gpu_tests`. Exit status 0 if all have passed in all environments; 1 if not; 2 if something is missing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.environments import ROOT, environment

VERSIONS = ("2.11.0", "2.15.0")
"""The oldest that teraio supports, and the newest."""
PACKAGES = (
    "kvikio-cu13==26.10.*",
    "pytest>=8.3",
    "pytest-timeout>=2.3",
    "hypothesis>=6.120",
    "nvidia-cuda-crt",
    "safetensors>=0.8",
)
NOT_MADE_UP = 2


def run(folder: Path, arguments: Sequence[str]) -> int:
    """Run the tests in an environment. Return their exit status."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"{folder} is no environment: {python} is missing", file=sys.stderr)
        return NOT_MADE_UP
    print(f"== tests/gpu on the made-up GPU, {folder}", flush=True)
    made_up = [str(python), "-m", "tools.made_up_cuda", "--device-memory", "6GiB"]
    settings = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([*made_up, "--", "-m", "tools.gpu_tests", *arguments], cwd=ROOT, env=settings, check=False).returncode


def main(arguments: Sequence[str]) -> int:
    """Run the tests in all environments. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.made_up_gpu_tests", description="Run tests/gpu on the made-up GPU.")
    parser.add_argument("--environment", type=Path, action="append", help="an existing one (default: make one for each --torch)")
    parser.add_argument("--torch", action="append", help=f"a version (default: {' and '.join(VERSIONS)})")
    parser.add_argument("--pip-args", type=shlex.split, default=[], help="handed to pip install")
    options, of_pytest = parser.parse_known_args(arguments)
    instead = "name an environment that has one: make test-made-up-gpu MADE_UP_ENVS=/path/to/venv"
    folders = options.environment or [
        environment(ROOT / f"build/torch-{each}", sys.executable, each, PACKAGES, pip_args=options.pip_args, instead=instead)
        for each in options.torch or VERSIONS
    ]
    return max(run(folder.absolute(), of_pytest) for folder in folders)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
