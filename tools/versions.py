"""Tries teraio with versions of Python and PyTorch, and writes down what was found: docs/versions.json and docs/versions.md.

python -m tools.versions [--python EXECUTABLE ...] [--torch VERSION ...] [--environment FOLDER ...] [--step STEP ...] [--keep]
    [--pip-args ARGS]

Makes an environment under build/versions for each pair, unless existing ones are named, and removes it afterwards. In each, a
core of the tests, the demo with few steps, and two real models up to their plans run, one after the other. Exit status 1 if
anything failed; what it said is in build/versions.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.environments import ROOT, environment

FOUND = ROOT / "docs" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"
BUILD = ROOT / "build" / "versions"
PYTHONS = ("3.11", "3.12", "3.13")
TORCHES = ("2.11.0", "2.13.0", "2.14.1", "2.15.0")
PACKAGES = ("pytest>=8.3", "pytest-timeout>=2.3", "hypothesis>=6.120", "transformers>=5.20")

_CORE = (
    "runtime/test_torch_names.py",
    "runtime/system",
    "teraio/stages/test_split.py",
    "teraio/capturing/test_capture.py::test_nothing_is_pretended_afterwards_also_if_a_driver_is_needed",
    "teraio/capturing/test_capture.py::test_what_needs_values_or_random_state_of_a_gpu_alone_is_captured",
)
_MODELS = ("Llama", "ViT")
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=900")
STEPS: Mapping[str, Sequence[str]] = {
    "core": (*_PYTEST, *(f"tests/{each}" for each in _CORE)),
    "demo": ("-m", "examples.train_text", *"--iterations 9 --rounds 1 --output build/versions/demo".split()),
    "models": (*_PYTEST, *(f"tests/models/test_models.py::test_half_of_the_memory[model-{each}-eager]" for each in _MODELS)),
}
"""What runs in each environment, as arguments of its Python."""
_ASK = "import json, sys, torch; print(json.dumps(['%d.%d.%d' % sys.version_info[:3], torch.__version__, torch.version.cuda]))"

INTRODUCTION = """\
# Versions

<!-- written by python -m tools.versions -->

teraio needs Linux, Python 3.11 or later and PyTorch 2.11 or later. There are no upper bounds, since no break is known. The
private names of PyTorch that teraio uses are listed in `runtime/torch_names.py` and looked up when it is imported: if a newer
PyTorch has renamed one, an error says which.

`make test-versions` makes an environment for each Python that is there and each PyTorch, and runs a core of the tests, the demo
with few steps, and two real models, each trained without a budget and with half of its memory up to a plan, with the same bits.
It takes 4.5 GB of disk for one environment at a time, where pip finds PyTorch's builds for CUDA, as on PyPI; `PIP_ARGS` names
an index that has those for CPUs. `ARGS="--torch 2.13.0 --python /usr/bin/python3.12"` chooses, `--step core` runs one of the
three. Each cell is the last run on that version, without a GPU. What ran on a GPU, and on one made of software, is on the page
[GPUs](gpu.md).

All tests run with Python 3.11 and PyTorch 2.13.0, built for CPUs. Where these runs were made, pip found no other builds for
CPUs, and took none newer than 2.14.1. So the newest PyTorch, 2.15.0, is not in the table. With Python 3.13 it has run the tests
for a GPU on [one made of software](gpu.md#a-gpu-made-of-software), and trainings by hand, with the bits of `torch.compile`.

What these runs found, and what is mended: Python 3.12 counts objects that it never frees as frozen, so that its garbage collector
was not kept from what a training holds. No private name of PyTorch was missing.

"""


def interpreters() -> list[str]:
    """Return an interpreter for each of PYTHONS that is there: by its name, or installed by pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = []
    for version in PYTHONS:
        named = [path for path in [shutil.which(f"python{version}")] if path is not None]
        works = (each for each in [*named, *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))] if _version(each) == version)
        found += [*works][:1]
    return found


def _version(python: str) -> str:
    """Return the first two numbers of an interpreter's version, "" if it does not run, as one that pyenv stands for."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def outcome(step: str, status: int, said: str) -> list[int]:
    """Return how many have passed and failed in a step: tests, or the demo. Skipped ones count as nothing."""
    summary = next((line for line in reversed(said.splitlines()) if re.search(r" in [\d.]+s", line)), "")
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|error)", summary)}
    if step == "demo" or not counts:
        return [int(status == 0), int(status != 0)]
    return [counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0)]


def tried(folder: Path, steps: Sequence[str]) -> dict[str, Any]:
    """Run steps in an environment, and return what was found."""
    python = str((folder / "bin" / "python").absolute())
    # Inductor compiles in the process itself: starting others for it takes longer than they save.
    settings = {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    environment = {**settings, **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    asked = subprocess.run([python, "-c", _ASK], check=True, capture_output=True, text=True)
    version, torch, cuda = json.loads(asked.stdout)
    cell: dict[str, Any] = {"python": version, "torch": torch, "cuda": cuda, "date": str(datetime.date.today())}
    for step in steps:
        print(f"== Python {version}, torch {torch}: {step}", flush=True)
        done = subprocess.run([python, *STEPS[step]], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        said = done.stdout + done.stderr
        BUILD.mkdir(parents=True, exist_ok=True)
        (BUILD / f"python-{version}-torch-{torch}-{step}.log").write_text(said)
        cell[step] = outcome(step, done.returncode, done.stdout)
        if done.returncode:
            print("\n".join(said.splitlines()[-20:]), file=sys.stderr)
    return cell


def merged(cells: Sequence[Mapping[str, Any]], cell: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the cells with that one in the place of an earlier run on the same versions, in the order of the table.

    Steps that it has not run stay as they were found on the same day.
    """
    for each in cells:
        if all(each[name] == cell[name] for name in ("python", "torch", "cuda", "date")):
            cell = {**each, **cell}
    return sorted([*(each for each in cells if _place(each) != _place(cell)), cell], key=_place)


def _place(cell: Mapping[str, Any]) -> tuple[list[int], bool, list[int]]:
    def numbers(version: str, count: int) -> list[int]:
        return [int(part) for part in version.partition("+")[0].split(".")[:count]]

    return numbers(cell["torch"], 3), cell["cuda"] is not None, numbers(cell["python"], 2)


def page(cells: Sequence[Mapping[str, Any]]) -> str:
    """Return the content of `docs/versions.md`."""
    if not cells:
        return f"{INTRODUCTION}No run is recorded yet.\n"
    builds = {(cell["torch"].partition("+")[0], cell["cuda"]): "" for cell in cells}
    rows = [f"| PyTorch | {' | '.join(f'Python {each}' for each in PYTHONS)} |", f"|---|{'---|' * len(PYTHONS)}"]
    for torch, cuda in builds:
        here = {cell["python"]: cell for cell in cells if (cell["torch"].partition("+")[0], cell["cuda"]) == (torch, cuda)}
        texts = [[_text(cell) for python, cell in here.items() if python.startswith(f"{each}.")] for each in PYTHONS]
        build = f"built for CUDA {cuda}" if cuda else "built for CPUs"
        rows.append(f"| {torch}, {build} | {' | '.join(text[0] if text else 'not run' for text in texts)} |")
    return INTRODUCTION + "\n".join(rows) + "\n"


def _text(cell: Mapping[str, Any]) -> str:
    ran = [step for step in STEPS if step in cell]
    told = ", ".join({"core": "{} tests", "demo": "demo", "models": "{} models"}[step].format(cell[step][0]) for step in ran)
    if failed := [step for step in ran if _failed(cell[step])]:
        told = "**failed:** " + ", ".join(f"{step} {cell[step][1]} of {sum(cell[step])}" for step in failed)
    if missing := [step for step in STEPS if step not in ran]:
        told += f"; {', '.join(missing)} not run"
    return f"{told} ({cell['python']}, {cell['date']})"


def _failed(counts: Sequence[int]) -> bool:
    return counts[1] > 0 or counts[0] == 0


def main(arguments: Sequence[str]) -> int:
    """Try all pairs. Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.versions", description="Try teraio with versions of Python and PyTorch."
    )
    parser.add_argument("--python", action="append", help="an interpreter (default: those of 3.11 to 3.13 that are there)")
    parser.add_argument("--torch", action="append", help=f"a version (default: {', '.join(TORCHES)})")
    parser.add_argument("--environment", type=Path, action="append", help="an existing one, in place of those")
    parser.add_argument("--step", action="append", choices=STEPS, help="what to run (default: all)")
    parser.add_argument("--keep", action="store_true", help="leave the environments that were made")
    parser.add_argument("--pip-args", type=shlex.split, default=[], help="handed to pip install")
    options = parser.parse_args(arguments)
    pairs = [(python, torch) for python in options.python or interpreters() for torch in options.torch or TORCHES]
    failed = False
    for given in options.environment or pairs:
        folder = given if isinstance(given, Path) else BUILD / f"python-{_version(given[0])}-torch-{given[1]}"
        try:
            if not isinstance(given, Path):
                python, torch = given
                instead = "name an environment that has one by --environment"
                environment(folder, python, torch, PACKAGES, pip_args=options.pip_args, instead=instead)
            cell = tried(folder, options.step or [*STEPS])
        except SystemExit as refusal:
            print(f"{folder.name}: {refusal}", file=sys.stderr)
            failed = True
            continue
        finally:
            if not (options.keep or isinstance(given, Path)):
                shutil.rmtree(folder, ignore_errors=True)
        cells = merged(json.loads(FOUND.read_text()) if FOUND.exists() else [], cell)
        FOUND.write_text(json.dumps(cells, indent=1) + "\n")
        PAGE.write_text(page(cells))
        failed = failed or any(_failed(cell[step]) for step in options.step or STEPS)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
