"""Pieces of HTML: text, tables, bars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from planner.schema import printable

__all__ = ["bar", "section", "table", "text"]


def text(value: str) -> str:
    """Text from a file or an error, as HTML that shows it as it is."""
    return escape(printable(value))


def bar(part: float, whole: float) -> str:
    """A bar as long as a share of the whole."""
    return f'<meter-bar><i style="width:{100 * part / whole if whole else 0:.1f}%"></i></meter-bar>'


def section(name: str, title: str, told: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A part of the page with a table. `told` and cells are HTML."""
    return f'<section id="{name}"><h2>{title}</h2><p class="faint">{told}</p>{table(columns, rows)}</section>'


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML. A leading ">" aligns a column to the right."""
    classes = ["number" if name.startswith(">") else name if name in ("link", "name", "note", "on") else "" for name in columns]
    head = "".join(
        f'<th scope="col" class="{look}">{text(name.lstrip(">"))}</th>' for name, look in zip(columns, classes, strict=True)
    )
    lines = (
        "<tr>" + "".join(f'<td class="{look}">{cell}</td>' for cell, look in zip(row, classes, strict=True)) + "</tr>"
        for row in rows
    )
    body = "\n".join(lines)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'
