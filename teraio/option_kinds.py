"""Kinds of options: what users may give for each, how it is checked, and what the docs and editors say of it.

Every check takes the option's name and what was given. It returns the value, or raises OptionsError with the option, what was
found and what is valid.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin

from planner.errors import OptionsError
from planner.schema import printable, short_repr
from teraio.ranks import rank_place

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
