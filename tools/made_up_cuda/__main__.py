"""Run Python on a GPU made of software.

python -m tools.made_up_cuda [--device-memory 6GiB] [--host-memory SIZE] [--delay-us N] [--seed N] [--numbers true|none] -- ARGUMENTS

ARGUMENTS are those of `python`: a script and its arguments, or -m and a module. The environment needs a torch that is built for
CUDA, and a C++ compiler. The first run builds the driver into build/made-up-cuda. See README.md in this folder.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.made_up_cuda.build import DRIVER, ROOT, BuildError, build
from tools.made_up_cuda.true_numbers import FOLDER_VARIABLE, NUMBERS_VARIABLE

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def size(text: str) -> int:
    """Return bytes from text such as "6GiB"."""
    found = re.fullmatch(r"([0-9.]+) ?([KMGT]iB|)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"found {text!r}, wanted a size such as 6GiB or 512MiB")
    return int(float(found[1]) * _UNITS[found[2]])


def environment(folder: Path, options: argparse.Namespace) -> dict[str, str]:
    """Return the environment of a process on the made-up GPU. folder: that of `build`."""
    now = os.environ
    computes = options.numbers == "true"
    made = {
        FOLDER_VARIABLE: str(folder),
        NUMBERS_VARIABLE: options.numbers,
        "MADE_UP_CUDA_DEVICE_BYTES": str(options.device_memory),
        "MADE_UP_CUDA_DELAY_US": str(options.delay_us),
        "MADE_UP_CUDA_SEED": str(options.seed),
        "MADE_UP_CUDA_POISON": "1" if computes else "0",
        "MADE_UP_CUDA_KERNELS": now.get("MADE_UP_CUDA_KERNELS", "refuse" if computes else "nothing"),
        "LD_PRELOAD": _path(str(folder / DRIVER), now.get("LD_PRELOAD")),
        "LD_LIBRARY_PATH": _path(str(folder), now.get("LD_LIBRARY_PATH")),
        "PYTHONPATH": _path(str(ROOT), str(folder / "site"), now.get("PYTHONPATH")),
        "CUDA_VISIBLE_DEVICES": "0",
        "OMP_NUM_THREADS": now.get("OMP_NUM_THREADS", "1"),  # streams compute side by side
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # forked workers would have no streams
    }
    if options.host_memory is not None:
        made["MADE_UP_CUDA_HOST_BYTES"] = str(options.host_memory)
    return {**now, **made}


def _path(*parts: str | None) -> str:
    return ":".join(part for part in parts if part)


def main(arguments: Sequence[str]) -> int:
    """Build the driver if needed and become Python on the made-up GPU. Return 2 if something is missing."""
    parser = argparse.ArgumentParser(prog="python -m tools.made_up_cuda", description="Run Python on a GPU made of software.")
    parser.add_argument("--device-memory", type=size, default=size("6GiB"), help="memory of the device (default: 6GiB)")
    parser.add_argument("--host-memory", type=size, help="the most host memory that can be pinned (default: no limit)")
    parser.add_argument(
        "--delay-us", type=int, default=0, help="start each operation of a stream late, by up to so much, at random"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the delays")
    parser.add_argument("--numbers", choices=["true", "none"], default="true", help="none: kernels do nothing")
    parser.add_argument("arguments", nargs="+", metavar="-- ARGUMENTS", help="those of python")
    options = parser.parse_args(arguments)
    try:
        folder = build()
    except BuildError as error:
        print(f"no made-up GPU: {error}", file=sys.stderr)
        return 2
    os.execve(sys.executable, [sys.executable, *options.arguments], environment(folder, options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
