"""Compiles the few functions that Python cannot express, against the PyTorch that is installed."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import UnsupportedError

Signature = tuple[Any, list[Any]]
"""A C function's result and arguments, as types of ctypes; None for no result."""


def load(source: Path, functions: Mapping[str, Signature], *, purpose: str) -> ctypes.CDLL:
    """Compile the C++ file `source`, or find it in Inductor's cache; the first time takes seconds.

    purpose: what needs it, for the message. Raises UnsupportedError where there is no compiler that can build it.
    """
    from torch._inductor.codecache import CppCodeCache
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    text = source.read_text()
    try:
        library: ctypes.CDLL = CppCodeCache.load(text, extra_flags=("-Wl,--no-as-needed", "-lc10"))
    except (CppCompileError, InvalidCxxCompiler, OSError) as error:
        raise UnsupportedError(
            f"{purpose} needs Linux and a C++ compiler that can build {source.name} ({error}); install g++, or name a compiler "
            "in the environment variable CXX"
        ) from error
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
