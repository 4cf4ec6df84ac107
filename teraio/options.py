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
    On CPU the device is main memory. On a GPU it holds for all that PyTorch keeps there, its cache included, while compiled
    regions and optimizer steps run. Default: what is available less a reserve of one tenth where storage or host_budget is
    given, else no limit."""

    host_budget: int | None = None
    """Main memory that blocks may wait in: pinned, and taken at once, for a GPU; on CPU a pool of its own beside the budget.
    More than the machine allows is refused. Default: none; for a GPU with a memory_budget but no storage half of the main
    memory that is available."""

    storage: tuple[Path, ...] = ()
    """Directory, or list of directories on different drives, for spill files; blocks are striped over all of them.
    Needed as soon as something has to move."""

    storage_budget: int | None = None
    """Bytes of spill files at most, all directories together. Default: what is free."""

    storage_timeout: float = 120.0
    """Seconds after which a drive that has not answered counts as dead: training then ends with an error, not with a hang.
    Far more than a piece of a block (some 10 MB) takes on the slowest drive."""

    storage_path: Literal["auto", "posix", "buffered", "kvikio", "staged"] = "auto"
    """How blocks get to the drives. "auto" tries and measures what there is and takes the fastest. On CPU: "posix" (direct
    I/O), and "buffered" (the page cache, host memory that no budget counts; "auto" takes it only where a file system has no
    direct I/O). On GPUs: "kvikio" (GPUDirect Storage), "staged" (through pinned host memory). What cannot work is refused."""

    checksums: bool = False
    """Check that what comes back from the drives is what was written; else training stops with ChecksumError. Costs
    processor time for each byte that moves. On CPU, what user code can reach (parameters, gradients) is not checked: while
    it is away, its file is mapped into memory, where user code may change it. Refused where blocks are copied from memory that
    the processor cannot read."""

    debug: bool = False
    """For tests, and to find out whether wrong results are teraio's doing; slow on a GPU, as each move lets the host wait.
    Memory is overwritten with the byte 0xFB when a block gives it up, and before one comes back into it, so that whoever uses
    it at a wrong time computes with absurd numbers. What comes back from any tier is compared with what left; else training
    stops with ChecksumError. On CPU, what user code can reach (parameters, gradients) is not compared, and the memory that it
    gives up goes back to the system as it is."""

    profile_iterations: int = 3
    """Iterations that are measured, after the first, before a plan is made. At least 1."""

    plan: Path | None = None
    """A plan file to use instead of making one. It must have been made from a trace of the same program; optimizers are cut into
    subgroups of the size that it names."""

    replan: bool = True
    """Correct the plan's prefetch starts by what was late, and plan again in the background when times drift from the
    predicted ones by more than a tenth. False: the plan stays as it was made and drift is only reported, as it always is
    with the option `plan`."""

    trace_out: Path | None = None
    """Where to write the trace; compressed if the name ends in .gz. Default: not written."""

    plan_out: Path | None = None
    """Where to write the plan; compressed if the name ends in .gz. Default: not written."""

    codegen: Literal["inductor", "eager"] = "inductor"
    """How stages are compiled. "eager" runs them operator by operator: slow, for debugging."""

    optimizer: Literal["auto", "off"] = "auto"
    """"auto": the steps of `torch.optim` optimizers run by parts where that gives the same bits, and their states are blocks
    under the budget. "off": steps run as they are and states stay on the device, but for optimizers that were given to
    `teraio.manage_optimizer`."""

    overlap_step: bool = False
    """Update a parameter inside the backward pass, as soon as its gradient is final, where that gives the same bits: gradients
    take less memory. User code finds `.grad` None after backward, and parameters updated before `step`. For loops with one
    backward pass to a step and nothing in between; what does not qualify in the first iterations is updated by `step` as
    usual, with the reason in the log. A second backward pass later on is an error. Nothing changes where all fits."""

    host_updates: bool = True
    """Let the plan run optimizer updates on the host's processor, over states that wait in the host tier (`host_budget`), by
    PyTorch's fused implementation for CPUs. Results agree with those of the device to rounding. False: never, so that
    parameters are the same bit for bit whatever the plan; likewise while `torch.use_deterministic_algorithms` is on."""

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


def _switch(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise OptionsError(f"option {name}: found {value!r}, wanted True or False")


def _storage_path(name: str, value: Any) -> str:
    if value in ("auto", "posix", "buffered", "kvikio", "staged"):
        return str(value)
    raise OptionsError(f"option {name}: found {value!r}, wanted 'auto', 'posix', 'buffered', 'kvikio' or 'staged'")


def _codegen(name: str, value: Any) -> str:
    if value in ("inductor", "eager"):
        return str(value)
    raise OptionsError(f"option {name}: found {value!r}, wanted 'inductor' or 'eager'")


def _optimizer(name: str, value: Any) -> str:
    if value in ("auto", "off"):
        return str(value)
    raise OptionsError(f"option {name}: found {value!r}, wanted 'auto' or 'off'")


_CHECKS: dict[str, Any] = {
    "memory_budget": parse_bytes,
    "host_budget": parse_bytes,
    "storage": _directories,
    "storage_budget": parse_bytes,
    "storage_timeout": _seconds,
    "storage_path": _storage_path,
    "checksums": _switch,
    "debug": _switch,
    "profile_iterations": _count,
    "plan": _file_to_read,
    "replan": _switch,
    "trace_out": _file_to_write,
    "plan_out": _file_to_write,
    "codegen": _codegen,
    "optimizer": _optimizer,
    "overlap_step": _switch,
    "host_updates": _switch,
    "solver_time_limit": _seconds,
}
