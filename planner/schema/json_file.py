"""Read and write trace and plan files.

A file may come from anyone. Reading ends with a valid model or with a FileFormatError of one line that names the place, whatever
the file holds. MAX_BYTES and MAX_VALUES bound the memory that reading takes.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import secrets
import stat
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from planner.errors import FileFormatError
from planner.schema.models import describe, field_path, short_repr

ModelT = TypeVar("ModelT", bound=BaseModel)

# Bytes of the longest file that is read, after unpacking. The trace of a 70-billion-parameter transformer (968 stages, 4418
# blocks) takes 1.2 MB.
MAX_BYTES = 64 << 20

# Numbers, texts, lists and objects in one file; that trace has 61 thousand. A short text can hold many values, and each takes
# about a hundred bytes when it is parsed. The report of a fault takes a kilobyte, and the three characters `{},` can be an
# object that lacks seven fields. So the lists of the models stop at the first faulty entry (pydantic's FailFast).
MAX_VALUES = 1_000_000

# The largest size of a number, positive or negative. Whole numbers then fit 64 bits, as file sizes do. With MIN_NUMBER, sums
# and quotients of sizes, rates and seconds stay finite: 10^6 · 10^19 / 10^-60 is far below 10^308.
MAX_NUMBER = (1 << 63) - 1

MIN_NUMBER = 1e-60  # the smallest size of a number other than 0. Differences caused by rounding are far larger.

MAX_TEXT_CHARACTERS = 4096  # characters of the longest text, so that messages and tables stay readable

# A place in a file. `()` is the top; `(place, key)` is the entry `key` of the value at `place`. Deep places share it.
_Place = tuple[Any, ...]


def read_model(path: str | os.PathLike[str], model: type[ModelT], error: type[FileFormatError]) -> ModelT:
    """Read and validate a JSON file of the format and version of `model`. It is unpacked if its name ends in `.gz`.

    Raises `error`, with the file and the place in it, when the file

    * cannot be read, or is longer than MAX_BYTES, or has more than MAX_VALUES values;
    * is not JSON, or is of another format or version;
    * gives a field twice, or holds a number or text beyond the limits above;
    * breaks a rule of `model`.
    """
    text = _read_text(path, error)
    content = _parse(path, text, error)
    _check_header(path, content, model, error)
    fault = next(faults(content), None)
    if fault is not None:
        raise error(f"{path}: {fault}")
    try:
        return model.model_validate_json(text, strict=True)
    except ValidationError as problem:
        raise error(f"{path}: {describe(problem)}") from problem


def read_format(path: str | os.PathLike[str]) -> str | None:
    """Return the text in the file's field `format`; None where there is no such field or it is not a text.

    Raises FileFormatError when the file cannot be read, is too long or is not JSON.
    """
    content = _parse(path, _read_text(path, FileFormatError), FileFormatError)
    found = content.get("format") if isinstance(content, dict) else None
    return found if isinstance(found, str) else None


def write_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Replace the file at `path` by `text`. A reader sees all of the old content or all of the new.

    The file is gzip-compressed if its name ends in `.gz`. It keeps its mode. A symbolic link stays, and the file that it leads to
    is replaced; a link that others could have made is refused. A device or a pipe, such as `/dev/stdout`, is never replaced: the
    text is written to it.

    Waits until the content has reached the drive. Raises OSError as the operating system gives it, ELOOP for a refused link.
    """
    _refuse_links_of_others(path)
    target = Path(os.path.realpath(path))
    content = text.encode("utf-8")
    content = gzip.compress(content, mtime=0) if _is_compressed(path) else content
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):  # a device, a pipe or a socket
        with open(path, "wb") as stream:
            stream.write(content)
        return
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    temporary = target.with_name(f".teraio-{secrets.token_hex(8)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600)
    try:
        with os.fdopen(handle, "wb") as stream:
            if mode is not None:
                os.fchmod(stream.fileno(), mode)
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _refuse_links_of_others(path: str | os.PathLike[str]) -> None:
    """Raise OSError if another user could have made a symbolic link in `path`, to lead this user to a file of his own."""
    trusted = os.geteuid(), 0
    whole = Path(path).absolute()
    for place in (whole, *whole.parents):
        if place.is_symlink():
            folder, maker = place.parent.stat(), place.lstat().st_uid
            private = folder.st_uid in trusted and not folder.st_mode & stat.S_IWGRP
            if folder.st_mode & stat.S_IWOTH or not (private or maker in trusted):
                what = "is a symbolic link that others could have made: give the file that it leads to, or another name"
                raise OSError(errno.ELOOP, what, str(place))


def _read_text(path: str | os.PathLike[str], error: type[FileFormatError]) -> str:
    """Return the unpacked text of a regular file, without a byte order mark. Never holds more than MAX_BYTES of it."""
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):  # for a directory, `open` gives the message
            raise error(f"{path}: cannot be read: it is a device or a pipe; give the name of a regular file")
        if found.st_size > MAX_BYTES:
            raise error(_too_long(path, f"{found.st_size:,} bytes", f"{MAX_BYTES:,}"))
        with open(path, "rb") as stream:
            with gzip.GzipFile(fileobj=stream) if _is_compressed(path) else stream as content:
                raw = content.read(MAX_BYTES + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as problem:
        raise error(f"{path}: not a whole gzip file, as its name says: {problem}; write it again") from problem
    except (OSError, ValueError) as problem:  # ValueError: a null byte in the path
        raise error(f"{path}: cannot be read: {getattr(problem, 'strerror', None) or problem}") from problem
    if len(raw) > MAX_BYTES:
        raise error(_too_long(path, f"more than {MAX_BYTES:,} bytes when unpacked", f"{MAX_BYTES:,}"))
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(f"{path}: not a text file (byte {problem.start}); expected JSON in UTF-8") from problem


def _is_compressed(path: str | os.PathLike[str]) -> bool:
    return Path(path).suffix == ".gz"


def _too_long(path: str | os.PathLike[str], found: str, most: str) -> str:
    return (
        f"{path}: {found}, and at most {most} are read; this is hardly a trace or a plan: if it is, let it have fewer "
        "stages and blocks"
    )


def _parse(path: str | os.PathLike[str], text: str, error: type[FileFormatError]) -> Any:
    # The most values that the text can hold, without parsing it: each follows a comma or opens a list or object.
    values = sum(map(text.count, "[{,")) + 1
    if values > MAX_VALUES:
        raise error(_too_long(path, f"about {values:,} values", f"{MAX_VALUES:,}"))
    try:
        return json.loads(text, object_pairs_hook=_mark_repeated_fields)
    except json.JSONDecodeError as problem:
        raise error(
            f"{path}: malformed JSON at line {problem.lineno} column {problem.colno}: {problem.msg}; "
            "the file may be cut short: write it again"
        ) from problem
    except RecursionError as problem:
        raise error(f"{path}: not usable JSON: it nests too deeply; write it again") from problem
    except ValueError as problem:  # the interpreter's limit on the digits of a number
        raise error(f"{path}: not usable JSON: a number has thousands of digits; write it again") from problem


def _check_header(path: str | os.PathLike[str], content: object, model: type[BaseModel], error: type[FileFormatError]) -> None:
    format_name, version = (model.model_fields[name].default for name in ("format", "version"))
    if not isinstance(content, dict):
        raise error(f"{path}: expected a JSON object with format {format_name!r}, found {type(content).__name__}")
    found = content.get("format")
    if found != format_name:
        raise error(f"{path}: field 'format' is {short_repr(found)}; this reader takes {format_name!r} only")
    found_version = content.get("version")
    if found_version != version or isinstance(found_version, bool):
        raise error(
            f"{path}: {format_name} version {short_repr(found_version)} is not known; this release reads version "
            f"{version} only: use a matching release of teraio or write the file again"
        )


class _Repeated:
    """Stands for the value of a field that an object gives more than once."""


def _mark_repeated_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object of parsed JSON. `faults` reports the fields that are given more than once."""
    content = dict(pairs)
    if len(content) < len(pairs):
        content |= {key: _Repeated() for key, times in Counter(key for key, _ in pairs).items() if times > 1}
    return content


def faults(content: Any) -> Iterator[str]:
    """Yield the faults in parsed JSON that the models' own rules do not find, each with its place."""
    waiting: list[tuple[_Place, Any]] = [((), content)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, dict | list):
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            waiting.extend(((place, key), entry) for key, entry in entries)
        elif isinstance(value, _Repeated):
            yield f"{_path(place)}: given more than once in the same object; leave one"
        elif isinstance(value, str) and len(value) > MAX_TEXT_CHARACTERS:
            yield f"{_path(place)}: a text of {len(value):,} characters; at most {MAX_TEXT_CHARACTERS:,} are allowed"
        elif isinstance(value, int | float) and abs(value) > MAX_NUMBER:
            yield f"{_path(place)}: the number {short_repr(value)}; at most {MAX_NUMBER:,} is allowed"
        elif isinstance(value, float) and 0 < abs(value) < MIN_NUMBER:
            yield f"{_path(place)}: the number {value}; it may be 0, or at least {MIN_NUMBER}"


def _path(place: _Place) -> str:
    keys: list[object] = []
    while place:
        place, key = place
        keys.append(key)
    return field_path(reversed(keys))
