"""Messages that the troubleshooting page quotes are messages that the code has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from .pages import DOCS, ROOT

GAP = "…"
PAGE = DOCS["troubleshooting"]


def _text_of(node: ast.expr) -> str:
    """The text of a literal, with a gap for each value that is put into it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text_of(part) for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else GAP


@cache
def texts() -> tuple[str, ...]:
    """All literal texts in the three packages."""
    found = []
    for package in ("planner", "runtime", "teraio"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr) or isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(re.sub(r"%[.,\d]*[a-z]", GAP, _text_of(node)))
    return tuple(found)


def quoted() -> Iterator[str]:
    """Messages in the first column of the tables."""
    for line in PAGE.text.splitlines():
        first = line.strip("|").split("|")[0]
        if line.startswith("| `"):
            yield from re.findall(r"`([^`]+)`", first)
        if 'the log says "' in first:
            yield from re.findall(r'the log says "([^"]+)"', first)


def has(text: str, message: str) -> bool:
    """Whether the pieces of the message between its gaps are in the text, in this order."""
    position = 0
    for piece in filter(None, (piece.strip() for piece in message.split(GAP))):
        position = text.find(piece, position)
        if position < 0:
            return False
        position += len(piece)
    return True


@pytest.mark.parametrize("message", [message for message in quoted() if " " in message])
def test_quoted_messages_exist(message: str) -> None:
    assert any(has(text, message) for text in texts()), f"docs/troubleshooting.md quotes {message!r}, which no text has"


def test_most_rows_quote_a_message() -> None:
    assert sum(" " in message for message in quoted()) > 40
