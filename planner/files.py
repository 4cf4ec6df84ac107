"""Reading and writing the two file formats: shared by trace and plan."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from planner.errors import FileFormatError


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

    Raises `error`, naming the file and the place in it, when the file cannot be read, is not JSON, is of
    another format or version, or breaks a rule of `model`.
    """
    try:
        raw = Path(path).read_bytes()
        text = (gzip.decompress(raw) if _is_compressed(path) else raw).decode("utf-8")
    except (gzip.BadGzipFile, EOFError, zlib.error) as problem:
        raise error(f"{path}: not a whole gzip file, as its name says: {problem}; write it again") from problem
    except UnicodeDecodeError as problem:
        raise error(
            f"{path}: not a text file (byte {problem.start}); expected a {format_name} JSON file"
        ) from problem
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror}") from problem
    try:
        content = json.loads(text)
    except json.JSONDecodeError as problem:
        raise error(
            f"{path}: malformed JSON at line {problem.lineno} column {problem.colno}: {problem.msg}; "
            "the file may be cut short: write it again"
        ) from problem
    except (RecursionError, ValueError) as problem:
        raise error(f"{path}: not usable JSON: {problem}; write it again") from problem
    _check_header(path, content, format_name=format_name, version=version, error=error)
    try:
        return model.model_validate_json(text, strict=True)
    except ValidationError as problem:
        raise error(f"{path}: {describe(problem)}") from problem


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
        raise error(
            f"{path}: expected a JSON object with format {format_name!r}, found {type(content).__name__}"
        )
    found = content.get("format")
    if found != format_name:
        raise error(f"{path}: field 'format' is {found!r}; this reader takes {format_name!r} only")
    found_version = content.get("version")
    if found_version != version or isinstance(found_version, bool):
        raise error(
            f"{path}: {format_name} version {found_version!r} is not known; this release reads version "
            f"{version} only: use a matching release of teraio or write the file again"
        )


def describe(problem: ValidationError, *, limit: int = 5) -> str:
    """The first few problems of a validation error, each with the path of the field, in one line."""
    parts = []
    for entry in problem.errors()[:limit]:
        place = ".".join(str(part) for part in entry["loc"]) or "file"
        parts.append(f"{place}: {entry['msg']}")
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
