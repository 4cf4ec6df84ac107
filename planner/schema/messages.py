"""Text from files that nobody vouches for, made safe and short for messages and tables."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable

from pydantic import ValidationError

__all__ = ["describe", "field_path", "printable", "short_repr"]

_MAX_PROBLEM_CHARACTERS = 300
"""Characters of one problem, or of one field's path, in a message."""

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


def describe(problem: ValidationError, *, limit: int = 5) -> str:
    """Return the first `limit` problems of a validation error, each with the path of its field, in one line."""
    parts = []
    for entry in problem.errors(include_url=False, include_input=False)[:limit]:
        parts.append(f"{field_path(entry['loc'])}: {printable(entry['msg'], most=_MAX_PROBLEM_CHARACTERS)}")
    more = problem.error_count() - limit
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")
