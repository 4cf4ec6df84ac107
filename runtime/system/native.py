"""Compiles the C++ functions of this package against the PyTorch that is installed, and loads them."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import UnsupportedError

Signature = tuple[Any, list[Any]]  # the result and the arguments of a C function, as types of ctypes. None: no result.

_building = threading.Lock()  # transfer threads need a function at the same moment; builds of one process share a file

_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


def load(source: Path, functions: Mapping[str, Signature], *, purpose: str, short: bool = False) -> ctypes.CDLL:
    """Compile the C++ file `source`, which takes seconds, or take it from Inductor's cache folder if it was compiled before.

    Each `#include "..."` is replaced by that file's text: the cache compares texts, so it notices every change.
    purpose: what needs the functions, for the message. short: none of them takes long, so that calls keep the interpreter's lock:
    whoever lets go of it may wait milliseconds until another thread gives it back. Raises UnsupportedError if no compiler can
    build them.
    """
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    try:
        path = _built(_with_includes(source))
        library = ctypes.PyDLL(path) if short else ctypes.CDLL(path)
    except (CppCompileError, InvalidCxxCompiler, OSError) as error:
        raise UnsupportedError(
            f"{purpose} needs Linux and a C++ compiler that can build {source.name} ({error}); install g++, or name a compiler "
            "in the environment variable CXX"
        ) from error
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _with_includes(source: Path) -> str:
    return _INCLUDE.sub(lambda include: _with_includes(source.with_name(include[1])), source.read_text())


def _built(text: str) -> str:
    """Return the path of the library that `text` is compiled to.

    Inductor's `CppCodeCache` would first find out which vector instructions work, by starting Python with PyTorch for each kind:
    up to 40 s of every process on a machine with a slow disk, for code that needs none of them.
    """
    from torch._inductor.codecache import write
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions, get_name_and_dir_from_output_file_path

    options = CppTorchOptions(extra_flags=("-Wl,--no-as-needed", "-lc10"))

    def builder(name: str, source: str, folder: str = "") -> CppBuilder:
        return CppBuilder(name=name, sources=source, BuildOption=options, output_dir=folder)

    _, source = write(text, "main.cpp", extra=builder("library", "source").get_command_line())
    name, folder = get_name_and_dir_from_output_file_path(source)
    path: str = builder(name, source, folder).get_target_file_path()
    with _building:
        if not os.path.exists(path):
            made = builder(f"{name}.{os.getpid()}", source, folder)  # another process may build it, and any may be killed
            made.build()
            os.replace(made.get_target_file_path(), path)
    return path
