"""Compiles the C++ functions of this package against the PyTorch that is installed, and loads them."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import UnsupportedError

Signature = tuple[Any, list[Any]]  # the result and the arguments of a C function, as types of ctypes. None: no result.

_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


def load(source: Path, functions: Mapping[str, Signature], *, purpose: str, short: bool = False) -> ctypes.CDLL:
    """Compile the C++ file `source`, which takes seconds, or take it from Inductor's cache if it was compiled before.

    Each `#include "..."` is replaced by that file's text: the cache compares texts, so it notices every change.
    purpose: what needs the functions, for the message. short: none of them takes long, so that calls keep the interpreter's lock:
    whoever lets go of it may wait milliseconds until another thread gives it back. Raises UnsupportedError if no compiler can
    build them.
    """
    from torch._inductor.codecache import CppCodeCache
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    try:
        library: ctypes.CDLL = CppCodeCache.load(_with_includes(source), extra_flags=("-Wl,--no-as-needed", "-lc10"))
    except (CppCompileError, InvalidCxxCompiler, OSError) as error:
        raise UnsupportedError(
            f"{purpose} needs Linux and a C++ compiler that can build {source.name} ({error}); install g++, or name a compiler "
            "in the environment variable CXX"
        ) from error
    if short:
        library = ctypes.PyDLL(library._name)
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _with_includes(source: Path) -> str:
    return _INCLUDE.sub(lambda include: _with_includes(source.with_name(include[1])), source.read_text())
