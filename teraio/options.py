"""The options: what each one means, and where it comes from: code or environment variables.

Nothing else in teraio reads environment variables, but for those of torchrun, see `teraio.ranks`.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

from planner.errors import OptionsError
from planner.schema import printable, short_repr
from teraio.ranks import rank_place

# -- kinds of options: what users may give for each, how it is checked, and what the docs and editors say of it

# Every check takes the option's name and what was given. It returns the value, or raises OptionsError with the option, what was
# found and what is valid.

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
# Only digits of ASCII: int() would take others, too. Not more than 40: numbers without end take time without end.
_NUMBER = r"[0-9]{1,40}(?:\.[0-9]{1,40})?"


@dataclass(frozen=True, slots=True)
class Share:
    """A part of the memory that the device has, more than 0 and at most 1."""

    fraction: float


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of values. given: the type of what users give. shown: what the docs say of it."""

    check: Callable[[str, Any], Any]
    given: str
    shown: str


def kind_of(annotation: Any) -> Kind:
    """Return the kind of an option from the annotation of its field: `Annotated` with a kind, or a `Literal`."""
    if get_origin(annotation) is Annotated:
        return cast(Kind, annotation.__metadata__[-1])
    names = [f'"{choice}"' for choice in get_args(annotation)]
    return Kind(_one_of(get_args(annotation)), f"Literal[{', '.join(names)}]", ", ".join(f"`{name}`" for name in names))


def parse_bytes(name: str, value: Any) -> int:
    """Return bytes from a number or from text such as "24GiB" or "1.5 GB".

    Raises OptionsError for anything else and for sizes of 2^63 bytes or more.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63:
        return value
    if isinstance(value, str):
        match = re.fullmatch(rf"\s*({_NUMBER})\s*([A-Za-z]*)\s*", value)
        if match is not None and match[2].upper() in _UNITS:
            size = Fraction(match[1]) * _UNITS[match[2].upper()]
            if 1 <= size < 2**63:
                return int(size)
    raise OptionsError(
        f"option {name}: found {short_repr(value)}, wanted a number of bytes from 1 to 2^63 - 1, or text such as '24GiB' or "
        "'500MB'"
    )


def _size_or_share(name: str, value: Any) -> int | Share:
    if isinstance(value, str) and (match := re.fullmatch(rf"\s*({_NUMBER})\s*%\s*", value)):
        percent = float(match[1])
        if 0 < percent <= 100:
            return Share(percent / 100)
        raise OptionsError(f"option {name}: found {short_repr(value)}, wanted more than 0 % and at most 100 %")
    return parse_bytes(name, value)


def _tiles(name: str, value: Any) -> int | str:
    try:
        return value if value in ("auto", "off") else parse_bytes(name, value)
    except OptionsError:
        raise OptionsError(
            f"option {name}: found {short_repr(value)}, wanted 'auto', 'off', a number of bytes, or text such as '24GiB'"
        ) from None


def _directories(name: str, value: Any) -> tuple[Path, ...]:
    entries = value if isinstance(value, (list, tuple)) else [value]
    if not entries:
        raise OptionsError(f"option {name}: found an empty list, wanted one or several directories")
    paths = tuple(_path(name, entry).resolve() for entry in entries)
    for path in paths:
        if not path.is_dir():
            raise OptionsError(f"option {name}: {_shown(path)} is not a directory; create it first")
        if not os.access(path, os.W_OK | os.X_OK):
            raise OptionsError(f"option {name}: no permission to write to {_shown(path)}")
    if len(set(paths)) != len(paths):
        raise OptionsError(f"option {name}: a directory is given twice in {', '.join(map(_shown, paths[:4]))}")
    return paths


def _path(name: str, value: Any) -> Path:
    if isinstance(value, (str, os.PathLike)) and isinstance(text := os.fspath(cast(Any, value)), str) and text:
        path = Path(rank_place().fill(text)).expanduser()
        if "\0" in text or any(len(part) > 255 for part in os.fsencode(path).split(b"/")):
            raise ValueError("no file can have this name")
        return path
    raise OptionsError(f"option {name}: found {short_repr(value)}, wanted a path")


def _file_to_read(name: str, value: Any) -> Path:
    path = _path(name, value)
    if not path.is_file():
        raise OptionsError(f"option {name}: there is no file {_shown(path)}")
    return path


def _file_to_write(name: str, value: Any) -> Path:
    path = _path(name, value)
    require_directory(name, path.parent)
    return path


def require_directory(name: str, directory: Path) -> None:
    """Raise OptionsError unless the directory that the option `name` needs is there."""
    if not directory.is_dir():
        raise OptionsError(f"option {name}: there is no directory {_shown(directory)}; create it first")


def _shown(path: Path) -> str:
    return printable(str(path), most=100)


def _count(name: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        if value >= 2**31:
            raise OptionsError(f"option {name}: found {short_repr(value)}, wanted less than 2^31")
        return value
    raise OptionsError(f"option {name}: found {short_repr(value)}, wanted a whole number of at least 1")


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf"):
        return float(value)
    raise OptionsError(f"option {name}: found {short_repr(value)}, wanted a positive number of seconds")


def _switch(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise OptionsError(f"option {name}: found {short_repr(value)}, wanted True or False")


def _one_of(choices: tuple[str, ...]) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if value in choices:
            return str(value)
        *others, last = (repr(choice) for choice in choices)
        raise OptionsError(f"option {name}: found {short_repr(value)}, wanted {', '.join(others)} or {last}")

    return check


def _mode(name: str, value: Any) -> str:
    if value in ("max-autotune", "reduce-overhead"):
        remedy = "leave it out" if value == "reduce-overhead" else "give 'max-autotune-no-cudagraphs'"
        raise OptionsError(f"option {name}: {short_repr(value)} uses CUDA graphs, which need tensors that never move; {remedy}")
    return cast(str, _TUNING.check(name, value))


_PATH = "str | PathLike[str]"

Size = Annotated[int | None, Kind(parse_bytes, "int | str", 'bytes, or text such as `"24GiB"`')]
SizeOrShare = Annotated[int | Share | None, Kind(_size_or_share, "int | str", 'bytes, or text such as `"24GiB"` or `"50%"`')]
Tiles = Annotated[int | Literal["auto", "off"], Kind(_tiles, "int | str", '`"auto"`, `"off"`, bytes, or text such as `"24GiB"`')]
Directories = Annotated[tuple[Path, ...], Kind(_directories, f"{_PATH} | Sequence[{_PATH}]", "a path, or a list of paths")]
FileToRead = Annotated[Path | None, Kind(_file_to_read, _PATH, "a path")]
FileToWrite = Annotated[Path | None, Kind(_file_to_write, _PATH, "a path")]
Count = Annotated[int, Kind(_count, "int", "a whole number")]
Seconds = Annotated[float, Kind(_seconds, "float", "seconds")]
Switch = Annotated[bool, Kind(_switch, "bool", "`True` or `False`")]
_Tuning = Literal["default", "max-autotune-no-cudagraphs"]
_TUNING = kind_of(_Tuning)
Tuning = Annotated[_Tuning, Kind(_mode, _TUNING.given, _TUNING.shown)]


# -- the options

_PREFIX = "TERAIO_"
# Options of earlier versions, and what there is instead.
_REMOVED = {
    "config": "teraio.compile(model, **options) takes in code what tomllib.load reads from a file",
    "live": "teraio.on_iteration tells a function of yours what each iteration took",
    "plan_cache_folder": "plans are kept in the folder teraio/plans below the one that the variable XDG_CACHE_HOME names",
    "unlink_spill_files": "spill files never have a name",
    "user_writes": "what your code has changed is found out",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertOptions:
    """Options for unusual machines, for tests and for finding faults. Their defaults are right for nearly all trainings."""

    storage_timeout: Seconds = 120.0
    """Seconds after which a drive that has not answered counts as dead. Training then ends with an error and does not hang.

    Set it far above the time that the slowest drive takes for one chunk of a block (about 10 MB)."""

    storage_path: Literal["auto", "posix", "buffered", "kvikio", "staged"] = "auto"
    """How blocks are copied to the drives: on CPU `"posix"` (direct I/O) or `"buffered"` (page cache), on GPUs `"kvikio"`
    (GPUDirect Storage) or `"staged"` (through pinned host memory). `"auto"` measures the paths that work and takes the fastest.

    The page cache is host memory that no budget counts, so "auto" takes "buffered" only if the file system has no direct I/O.
    A path that cannot work on this machine is refused."""

    checksums: Switch = False
    """Check that every block that comes back from a drive is what was written; if not, training stops with ChecksumError.
    This costs processor time for each byte that moves, and 2 MiB of memory for each GiB on the drives.

    On CPU, your code can reach parameters, gradients and optimizer states while they are on a drive. What it reads there, for a
    checkpoint say, is checked after it: by the next compiled call or step, or by `teraio.reset()`. What it writes there stays in
    memory until then. On a system that does not tell which pages your code has touched, only activations are checked, and a
    warning says so. The option is refused if blocks are copied from memory that the processor cannot read."""

    debug: Switch = False
    """Find out whether teraio causes wrong results: overwrite memory that holds nothing with a pattern, and compare what comes
    back from any tier with what left; if they differ, training stops with ChecksumError. Slow. What is recomputed is compared
    with what was dropped; if they differ, training stops with UnsupportedError.

    Memory is filled with the byte 0xFB when a block gives it up, and again before a block comes back into it. Code that uses the
    memory at a wrong time then computes with absurd numbers. On a GPU, the host waits for each move. On CPU, memory that
    parameters and gradients give up goes back to the system as it is."""

    profile_iterations: Count = 3
    """Iterations that are measured before a plan is made, not counting the first one. At least 1.

    Of 3 or more, those count in which nothing else slowed the machine down. If too few agree, up to twice as many are
    measured."""

    replan: Switch = True
    """Start late prefetches earlier, and plan again in the background when measured times differ from predicted times by more
    than a tenth. `False`: the plan stays as it was made, and the log only reports the difference.

    A plan given by the option `plan` is never changed."""

    codegen: Literal["inductor", "eager"] = "inductor"
    """How stages are compiled. `"eager"` runs the operators of the model one by one, without fusing any: for debugging, or where
    Inductor does not work."""

    local_ranks: Count = 1
    """How many processes of this machine divide its memory, drives and cores: what no other option says is divided by this
    number. Default: as many as torchrun has started on this machine. `1`: this process takes what it would take alone.

    Budgets that are given are those of each process; their sum is checked. With the number that torchrun has started, the
    processes also wait for each other at the start, so that links are measured while all copy, and fail together."""

    rank_timeout: Seconds = 600.0
    """Seconds after which a process of this machine that has not answered the others counts as gone. Training then ends with
    RankError, which names it. Only for several processes that torchrun has started."""

    solver_time_limit: Seconds = 120.0
    """Seconds of processor time that planning may take, in the background. After that, the best plan found so far is used;
    its lower bound may take up to 10 more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(ExpertOptions):
    """All options of the backend, checked by `parse_options`; here those that users give, in `ExpertOptions` the others.

    Users give sizes as bytes, or as text such as "24GiB" or "500MB". The first paragraph below each field says in one to three
    sentences what the option does and what holds without it; the pages of `docs/` show it. A second paragraph gives details.
    The annotation of a field names its kind, which checks it: see `Kind`.
    """

    memory_budget: SizeOrShare = None
    """Device memory in bytes that training may use: parameters, gradients, activations, optimizer states and workspaces together.
    Default: the memory that is available, less one tenth, if `storage` or `host_budget` is given; else there is no limit.

    Text such as "50%" means that share of the device's memory. On CPU the device is main memory: what this process has of it and
    may still take, by the limits of its control groups too. There, a budget needs `storage` or `host_budget`. On a GPU the budget
    limits everything that PyTorch keeps on the device while compiled regions and optimizer steps run, including its cache."""

    host_budget: Size = None
    """Main memory in bytes in which blocks may wait: pinned memory for a GPU, on CPU a pool of its own beside `memory_budget`.
    Default: none; for a GPU with a `memory_budget` and no `storage`, half of the main memory that is available.

    For a GPU, all of it is allocated at the start. A size that the machine does not allow is refused."""

    storage: Directories = ()
    """One directory or a list of directories for spill files; blocks are striped over all of them.
    Default: none, so that nothing can move to a drive.

    The directories should lie on different drives. `{rank}` and `{local_rank}` stand for the numbers that torchrun gave this
    process."""

    storage_budget: Size = None
    """Largest size of the spill files in bytes, all directories together. Default: the space that is free."""

    host_updates: Switch = True
    """Let the plan run optimizer updates on the host's processor, over states in the host tier (`host_budget`). Results agree
    with updates on the device to rounding. `False`: never, so that parameters are the same bit for bit whatever the plan.

    The updates use PyTorch's fused implementation for CPUs. While `torch.use_deterministic_algorithms` is on, there are none."""

    overlap_step: Switch = False
    """Update each parameter inside the backward pass, as soon as its gradient is final, where that gives the same bits. Gradients
    then take less memory. User code finds `.grad` None after backward, and new parameters before `step`.

    For loops with one backward pass per step and nothing in between. A parameter that does not qualify in the first iterations is
    updated by `step` as usual; the log says why. A second backward pass later on raises UnsupportedError. If everything fits on
    the device, nothing changes.

    What is updated in the backward pass is updated on the device, whatever `host_updates` says."""

    recompute: Literal["auto", "off"] = "auto"
    """`"auto"`: the plan may drop activations and run forward stages again in the backward pass, where that is faster than to
    copy. `"off"`: never.

    Results stay the same bits. A tensor that a graph takes and that your code changes between the forward and the backward pass
    then stops training with UnsupportedError, if a stage that runs again reads it. With overlap_step, nothing is recomputed."""

    tiles: Tiles = "auto"
    """`"auto"`: what needs more than half of the budget only because it has many rows, as the head of a large vocabulary and its
    loss, runs for some rows at a time. A size: what needs more than so many bytes does, also without a budget. `"off"`: nothing.
    Other stages that need nearly all of the budget, or more than the size, are cut between their operators where that helps.

    Results by rows are equal up to rounding. Sums over rows, such as losses and gradients, are added up in another order, in 32
    bits. What is large in between is computed once more in the backward pass."""

    optimizer: Literal["auto", "off"] = "auto"
    """`"auto"`: steps of `torch.optim` optimizers run subgroup by subgroup where that gives the same bits, and optimizer states
    can move. `"off"`: steps run unchanged and states stay on the device.

    With "off", optimizers that were given to `teraio.manage_optimizer` are managed all the same."""

    plan: FileToRead = None
    """A plan file to follow; no other plan is made. It must come from a trace of the same program.
    Default: a plan is made from what is measured.

    `{rank}` and `{local_rank}` stand for the numbers that torchrun gave this process.
    Optimizers are cut into subgroups of the size that the plan names."""

    plan_cache: Literal["read-write", "read", "off"] = "read-write"
    """Keep plans for later starts of the same training, which then follow their plan from the second iteration on: nothing is
    profiled and nothing is solved. `"read"`: use kept plans, but keep none. `"off"`: neither.

    The same training: the same graphs and sizes, budgets, options and versions, on a machine with links of similar rates. A kept
    plan that does not fit is ignored. One whose times turn out to be wrong is replaced, see `replan`."""

    plan_out: FileToWrite = None
    """File to write the plan to, compressed if the name ends in .gz. Default: not written.

    With several processes, `{rank}` or `{local_rank}` in the name stands for the number of each."""

    trace_out: FileToWrite = None
    """File to write the trace to, compressed if the name ends in .gz. Default: not written.

    With several processes, `{rank}` or `{local_rank}` in the name stands for the number of each."""

    mode: Tuning = "default"
    """How thoroughly Inductor compiles stages, as `torch.compile` takes it: tuning takes long and gives faster stages.

    For codegen="inductor" only. Other modes use CUDA graphs, which need tensors that stay at their addresses."""


@cache
def kinds() -> dict[str, Kind]:
    """Return the kind of each option, by name."""
    return {name: kind_of(annotation) for name, annotation in get_type_hints(Options, include_extras=True).items()}


def parse_options(given: Mapping[str, Any] | None) -> Options:
    """Return the options, checked. Those given in code win over environment variables.

    An option that is None was not given. Raises OptionsError, which names the option, what was found and what is valid; also the
    variable, if it was found there.
    """
    options: dict[str, Any] = {"local_ranks": rank_place().local_world_size}
    for variable, text in sorted(os.environ.items()):
        if variable.startswith(_PREFIX) and text:  # an empty one gives nothing
            try:
                options |= _checked({variable.removeprefix(_PREFIX).lower(): _value_of_text(text)})
            except OptionsError as error:
                raise OptionsError(f"environment variable {printable(variable, most=100)}: {error}") from None
    parsed = Options(**options | _checked(given or {}))
    if parsed.codegen == "eager" and parsed.mode != "default":
        raise OptionsError(f"option mode: {parsed.mode!r} is for codegen='inductor'; leave out one of them")
    return parsed


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the options that are given, checked."""
    checked = {}
    for name, value in given.items():
        if name in _REMOVED:
            raise OptionsError(f"option {name} was removed: {_REMOVED[name]}; leave it out")
        if name not in kinds():
            raise OptionsError(f"unknown option {short_repr(name)}; valid options are {', '.join(sorted(kinds()))}")
        try:
            if value is not None:
                checked[name] = kinds()[name].check(name, value)
        except (ArithmeticError, OSError, RuntimeError, TypeError, ValueError) as error:  # no such user, a name that is too long
            why = getattr(error, "strerror", None) or error
            raise OptionsError(f"option {name}: found {short_repr(value)}: {printable(str(why), most=100)}") from error
    return checked


def variable_of(option: str) -> str:
    """Return the name of the environment variable of an option."""
    return f"{_PREFIX}{option.upper()}"


def cache_folder() -> Path:
    """Return the folder in which teraio may keep files for later runs of this user. It need not exist."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "teraio"


def _value_of_text(text: str) -> Any:
    """Return the value that TOML writes as `text`; the text itself if that is no value: text needs no quotes."""
    if text in ("True", "False"):
        return text == "True"
    try:
        found = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return found["value"] if len(found) == 1 else text
