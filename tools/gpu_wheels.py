"""Tell which packages of tools/gpu-wheels.txt are missing here. Needs nothing but the standard library.

python tools/gpu_wheels.py        exit status 1 if teraio itself lacks a package
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

LIST = Path(__file__).with_name("gpu-wheels.txt")
PARTS = {
    "teraio": "nothing runs without",
    "kvikio": 'the storage path "kvikio" and its tests do not run without',
    "rivals": "not all of `python -m benchmarks rivals` runs without",
}


@dataclass(frozen=True, slots=True)
class Wheel:
    """A line of the list. part: one of PARTS."""

    requirement: str
    part: str
    why: str

    @property
    def name(self) -> str:
        """The name of the package."""
        return name_of(self.requirement)


def name_of(requirement: str) -> str:
    """Return the name of the package in a requirement."""
    return re.split(r"[\s<>=!~;\[(]", requirement, maxsplit=1)[0]


def wheels(path: Path = LIST) -> Iterator[Wheel]:
    """Yield the lines of the list."""
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            requirement, comment = line.split("#", 1)
            part, why = comment.split(":", 1)
            yield Wheel(requirement.strip(), part.strip(), why.strip())


def missing(part: str) -> list[Wheel]:
    """Return the packages of `part` of which no version is installed."""
    return [wheel for wheel in wheels() if wheel.part == part and not is_installed(wheel.name)]


def is_installed(name: str) -> bool:
    """Return whether any version of the package is installed. KvikIO may also be the one for CUDA 12."""
    for known in (name, name.replace("cu13", "cu12")):
        try:
            distribution(known)
        except PackageNotFoundError:
            continue
        return True
    return False


def report() -> bool:
    """Print what is missing to standard error. Return whether teraio itself has all that it needs."""
    for part, effect in PARTS.items():
        if absent := missing(part):
            print(f"{effect}:", file=sys.stderr)
            for wheel in absent:
                print(f"  {wheel.requirement:24}{wheel.why}", file=sys.stderr)
    if any(missing(part) for part in PARTS):
        print(f"{LIST.name} says how to bring them along as wheels", file=sys.stderr)
    return not missing("teraio")


if __name__ == "__main__":
    sys.exit(not report())
