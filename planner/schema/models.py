"""Base classes and types of everything that is in a trace or a plan, and messages about what a file holds.

Such text is from files that nobody vouches for: messages and tables get it safe and short.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

_T = TypeVar("_T")

Bytes = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Id = Annotated[int, Field(ge=0, lt=2**63)]
# FailFast: only the first fault of a list is reported. Collecting all of them could take gigabytes.
Ids = Annotated[tuple[Id, ...], FailFast()]


class FrozenModel(BaseModel):
    """Base of all file models: immutable, no unknown fields, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_by_name=True, validate_by_alias=True)

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """What `once` keeps. It is no part of the file or of copies."""
        return {}

    def once(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return what `make` works out from this object. It is called once for each key."""
        if key not in self.memo:
            self.memo[key] = make()
        found: _T = self.memo[key]
        return found

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields replaced. The new values are not validated; cached properties are computed again."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied


class GrownModel(FrozenModel):
    """Base of models that got the fields `added_later` after files of them had been written.

    Such a field is left out of the file where it has its default value. So older files and their fingerprints stay the same.
    """

    added_later: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _leave_out_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        content: dict[str, object] = write(self)
        for name in self.added_later:
            if getattr(self, name) == type(self).model_fields[name].default:
                content.pop(name, None)
        return content


def check_consecutive(label: str, ids: list[int]) -> None:
    for position, identifier in enumerate(ids):
        if identifier != position:
            raise ValueError(f"{label}: ids must be 0, 1, 2, …; found id {identifier} at position {position}")


def check_ids(owner: str, ids: tuple[int, ...], count: int, what: str) -> None:
    for identifier in ids:
        if identifier >= count:
            raise ValueError(f"{owner} refers to {what} {identifier}; there are {count} ({what} ids are 0 to {count - 1})")


_MOST_PROBLEMS = 5  # of one file that a message names
_MAX_PROBLEM_CHARACTERS = 300  # characters of one problem, or of one field's path, in a message

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60


def short_repr(value: object) -> str:
    """Return `repr(value)`, cut to about 60 characters; of a number of thousands of digits, its type."""
    try:
        return printable(_short.repr(value))
    except ValueError:  # Python does not write such numbers
        return f"<{type(value).__name__} object>"


def printable(text: str, *, most: int | None = None) -> str:
    """Return the text with escapes in place of characters that a terminal might act on, cut to about `most` characters.

    Such characters are escape sequences, line ends and marks that reverse the order of writing. Their escapes look like `\\x1b`.
    """
    if most is not None and len(text) > most:
        text = f"{text[:most]}… ({len(text):,} characters)"
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else character.encode("unicode_escape").decode() for character in text)


def field_path(keys: Iterable[object]) -> str:
    """Return the path of a field, such as `blocks.3.size_bytes`; `file` for the top."""
    return printable(".".join(map(str, keys)), most=_MAX_PROBLEM_CHARACTERS) or "file"


def describe(problem: ValidationError) -> str:
    """Return the first problems of a validation error, each with the path of its field, in one line."""
    named = problem.errors(include_url=False, include_input=False)[:_MOST_PROBLEMS]
    parts = [f"{field_path(entry['loc'])}: {printable(entry['msg'], most=_MAX_PROBLEM_CHARACTERS)}" for entry in named]
    more = problem.error_count() - _MOST_PROBLEMS
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")
