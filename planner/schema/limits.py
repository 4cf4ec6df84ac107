"""Limits on what a file may hold, beyond the rules of the models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planner.schema.messages import field_path, short_repr

__all__ = [
    "MAX_BYTES",
    "MAX_NUMBER",
    "MAX_TEXT_CHARACTERS",
    "MAX_VALUES",
    "MIN_NUMBER",
    "count_values",
    "faults",
    "mark_repeated_fields",
]

MAX_BYTES = 64 << 20
"""Bytes of the longest file that is read, after unpacking. The trace of a 70-billion-parameter transformer (968 stages, 4418
blocks) takes 1.2 MB."""

MAX_VALUES = 1_000_000
"""Numbers, texts, lists and objects in one file; that trace has 61 thousand.

A short text can hold many values, and each takes about a hundred bytes when it is parsed. The report of a fault takes a kilobyte,
and the three characters `{},` can be an object that lacks seven fields. So the lists of the models stop at the first faulty entry
(pydantic's FailFast)."""

MAX_NUMBER = (1 << 63) - 1
"""The largest size of a number, positive or negative.

Whole numbers then fit 64 bits, as file sizes do. With MIN_NUMBER, sums and quotients of sizes, rates and seconds stay finite:
10^6 · 10^19 / 10^-60 is far below 10^308."""

MIN_NUMBER = 1e-60
"""The smallest size of a number other than 0. Differences caused by rounding are far larger."""

MAX_TEXT_CHARACTERS = 4096
"""Characters of the longest text, so that messages and tables stay readable."""

_Place = tuple[Any, ...]
"""A place in a file. `()` is the top; `(place, key)` is the entry `key` of the value at `place`. Deep places share it."""


class _Repeated:
    """Stands for the value of a field that an object gives more than once."""


def count_values(text: str) -> int:
    """Return the largest number of values that a JSON text can hold, without parsing it.

    Every value follows a comma, or it opens a list or object, or it is the first entry of one.
    """
    return sum(map(text.count, "[{,")) + 1


def mark_repeated_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object of parsed JSON. `faults` reports the fields that are given more than once."""
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                content[key] = _Repeated()
            seen.add(key)
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
