"""Helpers for tables. Names come from files: characters that a terminal might act on are shown as escapes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.errors import TeraioError
from planner.schema import printable

__all__ = [
    "Page",
    "exact_bytes",
    "facts",
    "format_bytes",
    "format_seconds",
    "limit_bytes",
    "named",
    "plain",
    "section",
    "share",
    "show",
    "table_of",
    "write_out",
]

Page = tuple[RenderableType, ...]
"""Tables that are printed with an empty line between them."""

_WIDE = 300


def format_bytes(size_bytes: float) -> str:
    """Return "1.50 GiB", "64.0 MiB" or "10 B": three digits, so that columns are easy to compare."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= scale:
            return f"{_three_digits(size_bytes / scale)} {unit}"
    return f"{size_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return "1.50 s", "64.0 ms" or "3.00 µs"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return "0 s" if seconds <= 0 else f"{seconds / 1e-9:.0f} ns"


def show(page: Page) -> None:
    """Print a page: as wide as the terminal, or as wide as needed where it is no terminal. Raises as `write_out` does."""
    console = Console()
    if not console.is_terminal:
        console.width = _WIDE
    with _explained(), console.capture() as capture:
        for position, part in enumerate(page):
            console.print(*([""] if position else []), part, sep="\n")
    text = "\n".join(line.rstrip() for line in capture.get().splitlines())
    write_out(text.encode(console.encoding, "replace").decode(console.encoding))  # the terminal may lack a character


def write_out(text: str) -> None:
    """Print to the standard output at once. Raises TeraioError if it cannot be written, and BrokenPipeError."""
    with _explained():
        print(text, flush=True)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # whoever read it has enough: the command ends quietly
    except OSError as error:
        with contextlib.suppress(OSError):
            sys.stdout.close()  # otherwise the interpreter writes what is left when it ends, and fails again
        raise TeraioError(f"the standard output cannot be written: {error.strerror}") from error


def facts(*entries: tuple[str, str]) -> Table:
    """Return names and values in two columns. Entries with an empty value are left out."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in entries:
        if value:
            table.add_row(name, plain(value))
    return table


def table_of(*columns: str) -> Table:
    """Return an empty table. A leading ">" aligns a column to the right. Long names are folded, never cut."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        right = name.startswith(">")
        justify: Literal["left", "right"] = "right" if right else "left"
        table.add_column(name.lstrip(">"), justify=justify, overflow="fold", no_wrap=right)
    return table


def section(title: str, table: Table, of: int) -> Group:
    """Return a table under its title. The title says if the table shows fewer rows than there are (`of`)."""
    shown = table.row_count
    more = "" if shown == of else f": {shown} of {of} (--rows shows more)"
    return Group(Text(title + more, style="bold"), table)


def named(number: int | None, name: str | None) -> Text:
    """Return the number of a stage or block, with its name if that is known; an empty text for None."""
    if number is None:
        return Text("")
    return plain(str(number) if name is None else f"{number} {name}")


def plain(text: str) -> Text:
    """Return text that is shown as it is: no markup, no control characters."""
    return Text(printable(text))


def exact_bytes(size_bytes: int) -> str:
    """Return "1.50 GiB (1,610,612,736 bytes)"."""
    rounded = format_bytes(size_bytes)
    return rounded if size_bytes < 1024 else f"{rounded} ({size_bytes:,} bytes)"


def limit_bytes(size_bytes: int | None) -> str:
    """Return a budget as text; None is no limit."""
    return "no limit" if size_bytes is None else exact_bytes(size_bytes)


def share(part: float, whole: float) -> str:
    """Return "12.5%"; 0 if `whole` is 0."""
    return f"{part / whole if whole else 0.0:.1%}"


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
