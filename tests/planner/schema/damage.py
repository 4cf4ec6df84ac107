"""Trace and plan files that are damaged at random: in their values and structure, or in their bytes."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Iterator
from typing import Any

from planner.schema import MAX_NUMBER

VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 7, 10, 1 << 31, 1 << 62, MAX_NUMBER, MAX_NUMBER + 1, 10**30, -(1 << 63)),
    *(-0.0, 0.5, 1e-320, 1e-60, 1e-9, 1e18, 1e300, float("inf"), float("nan")),
    *("", "x", "device", "host", "storage", "\ud800\x1b[2J"),
    *([], [0], [0, 1, 2, 3], [3, 2], [[]], {}, {"id": 0}),
)


def damaged(content: Any, chance: random.Random) -> bytes:
    """Return a file with one to four faults. One in six is damaged in its bytes, one in twelve is a compressed file."""
    content = copy.deepcopy(content)
    for _ in range(chance.choice((1, 1, 1, 1, 2, 4))):
        chance.choice((_replace, _nudge, _nudge, _nudge, _remove, _repeat, _swap))(content, chance)
    raw = json.dumps(content).encode()
    if chance.random() < 1 / 6:
        raw = _damage_bytes(raw, chance)
    if chance.random() < 1 / 12:
        raw = gzip.compress(raw, 1)
        return _damage_bytes(raw, chance) if chance.random() < 0.5 else raw
    return raw


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every field and entry, at any depth, as (what holds it, key)."""
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(entries):
        yield content, key
        yield from _places(value)


def _place(content: Any, chance: random.Random) -> tuple[Any, Any]:
    return chance.choice([*_places(content)] or [({"": None}, "")])


def _replace(content: Any, chance: random.Random) -> None:
    holder, key = _place(content, chance)
    holder[key] = copy.deepcopy(chance.choice(VALUES))


def _nudge(content: Any, chance: random.Random) -> None:
    """Change a number a little: the file often stays a valid one, with a trace or plan that nobody would make."""
    numbers = [(holder, key) for holder, key in _places(content) if type(holder[key]) in (int, float)]
    if numbers:
        holder, key = chance.choice(numbers)
        value = holder[key]
        holder[key] = chance.choice((value + 1, value - 1, value * 2, value * 1000, value / 2, -value))


def _remove(content: Any, chance: random.Random) -> None:
    holder, key = _place(content, chance)
    del holder[key]


def _repeat(content: Any, chance: random.Random) -> None:
    """Have an entry of a list several times, up to 2,000."""
    lists = [holder for holder, _ in _places(content) if isinstance(holder, list)]
    if lists:
        holder = chance.choice(lists)
        entry = chance.choice(holder)
        holder[chance.randint(0, len(holder)) : 0] = [entry] * chance.choice((1, 1, 2, 2000))


def _swap(content: Any, chance: random.Random) -> None:
    """Let two fields or entries change places."""
    (one, key), (other, other_key) = _place(content, chance), _place(content, chance)
    one[key], other[other_key] = copy.deepcopy(other[other_key]), copy.deepcopy(one[key])


def _damage_bytes(raw: bytes, chance: random.Random) -> bytes:
    changed = bytearray(raw)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(changed) + 1)
        changed[at : at + chance.choice((0, 1, 20))] = chance.randbytes(chance.choice((0, 1, 4)))
    return bytes(changed[: chance.randrange(len(changed) + 1)] if chance.random() < 0.2 else changed)
