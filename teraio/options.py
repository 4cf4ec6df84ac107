"""The options of the backend: `torch.compile(model, backend="teraio", options={...})`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast

from planner.errors import OptionsError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options, checked. Sizes are bytes, or text such as "24GiB" or "500MB"."""

    memory_budget: int | None = None
    """Device memory that training may use: parameters, gradients, activations, optimizer states and workspaces together.
    On CPU the device is main memory. Default: what is available less a reserve of one tenth where storage is given,
    else no limit."""

    host_budget: int | None = None
    """Pinned host memory that blocks may wait in. There is no host tier yet, so it is refused."""

    storage: tuple[Path, ...] = ()
    """Directory, or list of directories on different drives, for spill files; blocks are striped over all of them.
    Needed as soon as something has to move."""

    storage_budget: int | None = None
    """Bytes of spill files at most, all directories together. Default: what is free."""

    storage_timeout: float = 120.0
    """Seconds after which a drive that has not answered counts as dead: training then ends with an error, not with a hang.
    Far more than a piece of a block (some 10 MB) takes on the slowest drive."""

    profile_iterations: int = 3
    """Iterations that are measured, after the first, before a plan is made. At least 1."""

    plan: Path | None = None
    """A plan file to use instead of making one. It must have been made from a trace of the same program."""

    trace_out: Path | None = None
    """Where to write the trace; compressed if the name ends in .gz. Default: not written."""

    plan_out: Path | None = None
    """Where to write the plan; compressed if the name ends in .gz. Default: not written."""

    codegen: Literal["inductor", "eager"] = "inductor"
    """How stages are compiled. "eager" runs them operator by operator: slow, for debugging."""

    solver_time_limit: float = 30.0
    """Seconds that the solver may take, in the background, before the best plan found so far is used."""


def parse_options(given: Mapping[str, Any] | None) -> Options:
    """Check what the user gave. Raises OptionsError that names the option, what was found and what is valid."""
    given = dict(given or {})
    known = {f.name: f for f in fields(Options)}
    unknown = [name for name in given if name not in known]
    if unknown:
        raise OptionsError(f"unknown option {unknown[0]!r}; valid options are {', '.join(sorted(known))}")
    return Options(**{name: _CHECKS[name](name, value) for name, value in given.items() if value is not None})


def parse_bytes(name: str, value: Any) -> int:
    """Bytes from a number or from text like "24GiB", "1.5 GB". Raises OptionsError, also from 2^63 on."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63:
        return value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match is not None and match[2].upper() in _UNITS:
            size = float(match[1]) * _UNITS[match[2].upper()]
            if 1 <= size < 2**63:
                return int(size)
    raise OptionsError(
        f"option {name}: found {value!r}, wanted a number of bytes from 1 to 2^63 - 1, or text such as '24GiB' or '500MB'"
    )


def _directories(name: str, value: Any) -> tuple[Path, ...]:
    entries = value if isinstance(value, (list, tuple)) else [value]
    if not entries:
        raise OptionsError(f"option {name}: found an empty list, wanted one or several directories")
    paths = tuple(_path(name, entry).resolve() for entry in entries)
    for path in paths:
        if not path.is_dir():
            raise OptionsError(f"option {name}: {path} is not a directory; create it first")
        if not os.access(path, os.W_OK | os.X_OK):
            raise OptionsError(f"option {name}: no permission to write to {path}")
    if len(set(paths)) != len(paths):
        raise OptionsError(f"option {name}: a directory is given twice in {', '.join(map(str, paths))}")
    return paths


def _path(name: str, value: Any) -> Path:
    if isinstance(value, (str, os.PathLike)) and os.fspath(value):
        return Path(cast(Any, value)).expanduser()
    raise OptionsError(f"option {name}: found {value!r}, wanted a path")


def _file_to_read(name: str, value: Any) -> Path:
    path = _path(name, value)
    if not path.is_file():
        raise OptionsError(f"option {name}: there is no file {path}")
    return path


def _file_to_write(name: str, value: Any) -> Path:
    path = _path(name, value)
    if not path.parent.is_dir():
        raise OptionsError(f"option {name}: there is no directory {path.parent}; create it first")
    return path


def _count(name: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise OptionsError(f"option {name}: found {value!r}, wanted a whole number of at least 1")


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf"):
        return float(value)
    raise OptionsError(f"option {name}: found {value!r}, wanted a positive number of seconds")


def _codegen(name: str, value: Any) -> str:
    if value in ("inductor", "eager"):
        return str(value)
    raise OptionsError(f"option {name}: found {value!r}, wanted 'inductor' or 'eager'")


_CHECKS: dict[str, Any] = {
    "memory_budget": parse_bytes,
    "host_budget": parse_bytes,
    "storage": _directories,
    "storage_budget": parse_bytes,
    "storage_timeout": _seconds,
    "profile_iterations": _count,
    "plan": _file_to_read,
    "trace_out": _file_to_write,
    "plan_out": _file_to_write,
    "codegen": _codegen,
    "solver_time_limit": _seconds,
}
