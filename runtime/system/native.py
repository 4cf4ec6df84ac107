"""Loads the C++ functions of this package: those that came with the wheel, or else those that this machine compiles."""

from __future__ import annotations

import ctypes
import os
import shutil
import threading
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from planner.errors import UnsupportedError
from runtime.system import compilation

Signature = tuple[Any, list[Any]]  # the result and the arguments of a C function, as types of ctypes. None: no result.

_building = threading.Lock()  # transfer threads need a function at the same moment; builds of one process share a file


def compiler_path() -> str | None:
    """Return where the C++ compiler is, for these functions and for Inductor. None: there is none."""
    return shutil.which(compilation.compiler()[0])


def load(source: Path, functions: Mapping[str, Signature], *, purpose: str, short: bool = False) -> ctypes.CDLL:
    """Load the functions of a C++ file. Compiles it, which takes seconds, if that was neither done for the wheel nor here before.

    purpose: what needs the functions, for the message. short: none of them takes long, so that calls keep the interpreter's lock:
    whoever lets go of it may wait milliseconds until another thread gives it back. Raises UnsupportedError if no compiler can
    build them.
    """
    load_file = ctypes.PyDLL if short else ctypes.CDLL
    library = _shipped(source, load_file)
    if library is None:
        try:
            library = load_file(str(_built(source)))
        except OSError as error:
            raise UnsupportedError(
                f"{purpose} needs Linux and a C++ compiler that can build {source.name} ({error}); install g++, or name a "
                "compiler in the environment variable CXX"
            ) from error
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _shipped(source: Path, load_file: type[ctypes.CDLL]) -> ctypes.CDLL | None:
    """Return the library that came with the wheel. None: it has none for this PyTorch, or none that this system can load."""
    name = compilation.shipped_name(source, torch.__version__)
    if name is None or not source.with_name(name).exists():
        return None
    try:
        return load_file(str(source.with_name(name)))
    except OSError:  # built for a newer system, say
        return None


def _built(source: Path) -> Path:
    """Return the library that a file is compiled to, in Inductor's cache folder. Its name tells texts, PyTorchs and commands."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    def command(library: Path) -> list[str]:
        return compilation.command(source, library, Path(torch.__file__).parent)

    folder = Path(cache_dir()) / "teraio"
    made_of = [source.read_text(), torch.__version__, *command(folder)]
    path = folder / f"{source.stem}-{sha256(repr(made_of).encode()).hexdigest()[:32]}.so"
    with _building:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            made = path.with_suffix(f".{os.getpid()}.so")  # another process may build it, and any may be killed
            compilation.compile_library(command(made))
            made.replace(path)
    return path
