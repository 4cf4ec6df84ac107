"""Reading and writing the two file formats: shared by trace and plan.

A file may come from anyone. Whatever is in it, reading ends with a valid model or with a FileFormatError of one line
that names the place, and the memory that it takes is bounded by `MAX_BYTES` and `MAX_VALUES`.
"""

from __future__ import annotations

import gzip
import json
import os
import reprlib
import stat
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, ValidationError, model_serializer

from planner.errors import FileFormatError

__all__ = [
    "MAX_NUMBER",
    "MAX_TEXT_CHARACTERS",
    "MAX_BYTES",
    "MAX_VALUES",
    "MIN_NUMBER",
    "FrozenModel",
    "describe",
    "printable",
    "read_format",
    "read_model",
    "write_atomic",
]

MAX_BYTES = 64 << 20
"""The longest file that is read, in bytes, unpacked where it is compressed. The trace of a 70-billion-parameter
transformer (968 stages, 4418 blocks) takes 1.2 MB."""

MAX_VALUES = 1_000_000
"""The most numbers, texts, lists and objects in a file; that trace has 61 thousand. A short text can hold many: parsed,
each takes about a hundred bytes. Reports of faults take more (a kilobyte each, and the three characters `{},` can be an
object that lacks seven fields), so the models' lists end with the first entry that is faulty (pydantic's FailFast)."""

MAX_NUMBER = (1 << 63) - 1
"""No number in a file is greater, nor less than its negative: whole ones fit 64 bits, as file sizes do. With the next
limit, sums and quotients of sizes, rates and seconds stay finite, since 10^6 · 10^19 / 10^-60 is far below 10^308."""

MIN_NUMBER = 1e-60
"""No number in a file but 0 is nearer to 0; differences that are due to rounding only are far from it."""

MAX_TEXT_CHARACTERS = 4096
"""Characters of the longest name in a file; so that messages and tables stay readable."""

_LONGEST_PART = 300  # characters of one problem in a message
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60


class FrozenModel(BaseModel):
    """Base of all file models: immutable, no unknown fields, no NaN or infinity."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_by_name=True,
        validate_by_alias=True,
    )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields replaced (not validated). What was derived and cached is derived again."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied


class GrownModel(FrozenModel):
    """One that got fields after files of it had been written: `added_later`.

    Those are left out where they have their default, so that files, and fingerprints of what was there before, stay the same.
    """

    added_later: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _leave_out_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        content: dict[str, object] = write(self)
        for name in self.added_later:
            if getattr(self, name) == type(self).model_fields[name].default:
                content.pop(name, None)
        return content


ModelT = TypeVar("ModelT", bound=BaseModel)


def read_model(
    path: str | os.PathLike[str],
    model: type[ModelT],
    *,
    format_name: str,
    version: int,
    error: type[FileFormatError],
) -> ModelT:
    """Read and validate a JSON file, gzip-compressed if its name ends in `.gz`.

    Raises `error`, naming the file and the place in it, when the file cannot be read, is longer than `MAX_BYTES` or
    has more than `MAX_VALUES`, is not JSON, is of another format or version, or breaks a rule of `model`; and where it
    gives a field twice, or holds a number beyond `MAX_NUMBER` or below `MIN_NUMBER`, or a text longer than
    `MAX_TEXT_CHARACTERS`.
    """
    text = _read_text(path, error)
    content = _parse(path, text, error)
    _check_header(path, content, format_name=format_name, version=version, error=error)
    fault = next(_faults(content), None)
    if fault is not None:
        raise error(f"{path}: {fault}")
    try:
        return model.model_validate_json(text, strict=True)
    except ValidationError as problem:
        raise error(f"{path}: {describe(problem)}") from problem


def read_format(path: str | os.PathLike[str]) -> str | None:
    """What the file's field `format` says, None where there is no such field or it is no text.

    Raises FileFormatError when the file cannot be read, is too long or is not JSON.
    """
    content = _parse(path, _read_text(path, FileFormatError), FileFormatError)
    found = content.get("format") if isinstance(content, dict) else None
    return found if isinstance(found, str) else None


def _read_text(path: str | os.PathLike[str], error: type[FileFormatError]) -> str:
    """The text of a regular file, unpacked; never holds more than `MAX_BYTES` of it. A byte order mark is dropped."""
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):  # opening a folder says so itself
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


def _too_long(path: str | os.PathLike[str], found: str, most: str) -> str:
    return (
        f"{path}: {found}, and at most {most} are read: this is hardly a trace or a plan; if it is, let it have fewer "
        "stages and blocks"
    )


class _Repeated:
    """Stands for the value of a field that an object gives more than once."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                content[key] = _Repeated()
            seen.add(key)
    return content


def _parse(path: str | os.PathLike[str], text: str, error: type[FileFormatError]) -> Any:
    values = sum(map(text.count, "[{,")) + 1  # each follows a comma, or opens or begins a list or object
    if values > MAX_VALUES:
        raise error(_too_long(path, f"about {values:,} values", f"{MAX_VALUES:,}"))
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as problem:
        raise error(
            f"{path}: malformed JSON at line {problem.lineno} column {problem.colno}: {problem.msg}; "
            "the file may be cut short: write it again"
        ) from problem
    except RecursionError as problem:
        raise error(f"{path}: not usable JSON: it nests too deeply; write it again") from problem
    except ValueError as problem:  # the interpreter's limit on the digits of a number
        raise error(f"{path}: not usable JSON: a number has thousands of digits; write it again") from problem


def _faults(content: Any) -> Iterator[str]:
    """Everything in parsed JSON that the models' own rules do not catch, with its place."""
    waiting: list[tuple[_Place, Any]] = [((), content)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, dict | list):
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            waiting.extend(((place, key), entry) for key, entry in entries)
        elif isinstance(value, _Repeated):
            yield f"{_dotted(place)}: given more than once in the same object; leave one"
        elif isinstance(value, str) and len(value) > MAX_TEXT_CHARACTERS:
            yield f"{_dotted(place)}: a text of {len(value):,} characters; at most {MAX_TEXT_CHARACTERS:,} are allowed"
        elif isinstance(value, int | float) and abs(value) > MAX_NUMBER:
            yield f"{_dotted(place)}: the number {_short.repr(value)}; at most {MAX_NUMBER:,} is allowed"
        elif isinstance(value, float) and 0 < abs(value) < MIN_NUMBER:
            yield f"{_dotted(place)}: the number {value}; it may be 0, or at least {MIN_NUMBER}"


_Place = tuple[Any, ...]
"""Where in a file: `()` is the top, `(place, key)` what `key` leads to from there. Shares what is deep."""


def _dotted(place: _Place) -> str:
    keys: list[object] = []
    while place:
        place, key = place
        keys.append(key)
    return _joined(reversed(keys))


def _joined(keys: Iterable[object]) -> str:
    return printable(".".join(map(str, keys)), most=_LONGEST_PART) or "file"


def _is_compressed(path: str | os.PathLike[str]) -> bool:
    return Path(path).suffix == ".gz"


def _check_header(
    path: str | os.PathLike[str],
    content: object,
    *,
    format_name: str,
    version: int,
    error: type[FileFormatError],
) -> None:
    if not isinstance(content, dict):
        raise error(f"{path}: expected a JSON object with format {format_name!r}, found {type(content).__name__}")
    found = content.get("format")
    if found != format_name:
        raise error(f"{path}: field 'format' is {_short.repr(found)}; this reader takes {format_name!r} only")
    found_version = content.get("version")
    if found_version != version or isinstance(found_version, bool):
        raise error(
            f"{path}: {format_name} version {_short.repr(found_version)} is not known; this release reads version "
            f"{version} only: use a matching release of teraio or write the file again"
        )


def printable(text: str, *, most: int | None = None) -> str:
    """The text with every character that a terminal might act on (escape sequences, line ends, marks that reverse
    the order of writing) as its escape, `\\x1b` and the like; cut to about `most` characters."""
    if most is not None and len(text) > most:
        text = f"{text[:most]}… ({len(text):,} characters)"
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else character.encode("unicode_escape").decode() for character in text)


def describe(problem: ValidationError, *, limit: int = 5) -> str:
    """The first few problems of a validation error, each with the path of the field, in one line."""
    parts = []
    for entry in problem.errors(include_url=False, include_input=False)[:limit]:
        parts.append(f"{_joined(entry['loc'])}: {printable(entry['msg'], most=_LONGEST_PART)}")
    more = problem.error_count() - limit
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")


def write_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Replace the file at `path` by `text`, so that a reader sees the old or the new content, never half.

    A name that ends in `.gz` gives a gzip-compressed file.

    Blocks until the content has reached the drive. Raises OSError as the operating system gives it.
    """
    target = Path(path)
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            os.fchmod(stream.fileno(), 0o644)
            content = text.encode("utf-8")
            stream.write(gzip.compress(content, mtime=0) if _is_compressed(path) else content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
