"""How the C++ files of this package are compiled: for a wheel, when it is built, or on a machine, at their first use.

A build imports this file alone, by its path, maybe without PyTorch. So it imports nothing but Python's own library.
Each of them is whole: it includes no other file of this package.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

_OF_TORCH = re.compile(r"^#include <(c10|ATen)/", re.MULTILINE)
_RELEASE = re.compile(r"(\d+\.\d+)\.\d+(\+.*)?")


def shipped_name(source: Path, torch_version: str) -> str | None:
    """Return how the library of a C++ file is called in a wheel, beside that file. None: there can be none for this PyTorch.

    What is inlined from PyTorch's headers knows how its objects lie in memory, which holds for the releases of one minor version
    and their builds. Nothing is known of what lies between releases.
    """
    if not _OF_TORCH.search(source.read_text()):
        return f"{source.stem}.so"
    release = _RELEASE.fullmatch(torch_version)
    return f"{source.stem}.torch-{release[1]}.so" if release else None


def compiler() -> list[str]:
    """Return how the C++ compiler is called, whether it is there or not."""
    return shlex.split(os.environ.get("CXX") or "g++")


def command(source: Path, library: Path, torch_folder: Path | None) -> list[str]:
    """Return the command that compiles a C++ file for every processor of this kind.

    torch_folder: the folder of the package `torch`; None if the file needs none of its headers.
    """
    options = ["-std=c++20", "-O3", "-DNDEBUG", "-D_GLIBCXX_USE_CXX11_ABI=1", "-Wall", "-shared", "-fPIC", "-s"]
    made = [*compiler(), *options, str(source), "-o", str(library)]
    if torch_folder is None:
        return made
    headers = [f"-isystem{torch_folder}/include", f"-fmacro-prefix-map={torch_folder}=torch"]  # no folder of a builder
    # PyTorch has loaded its libraries by then, so they are found by their names.
    return [*made, *headers, f"-L{torch_folder}/lib", "-Wl,--as-needed", "-lc10", "-ltorch_cpu"]


def compile_library(compile_command: list[str]) -> None:
    """Run such a command. Raises OSError if there is no compiler, or with what it says if it fails."""
    done = subprocess.run(compile_command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{compile_command[0]} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
