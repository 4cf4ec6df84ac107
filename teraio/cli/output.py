"""What a command gives: a file that it writes, and tables or the same data as JSON on standard output.

This is the only place that renders. A command makes data, which `--json` prints, and declares a page over the same data: facts by
name, and tables as columns of rows. Names of fields tell units, so that a column is mostly the name of a field.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

from rich import table as rich_table
from rich.console import Console, Group, RenderableType
from rich.text import Text

import planner
from planner.errors import exact_bytes as exact_bytes
from planner.errors import format_bytes as format_bytes
from planner.errors import three_digits
from planner.schema import FrozenModel, printable, write_atomic

_WIDE = 300
_SILENT_SECONDS = 2.0

Data = dict[str, Any]  # what JSON can say

# A field of the row (`"size_bytes"`, or `"predicted.stall_seconds"` of what may be None), or a function that makes text of
# the row; None is an empty cell.
Column = str | Callable[[Data], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under the names of columns. A table without rows is left out of its page.

    A leading ">" in a column's name aligns it to the right, "|" only keeps it in one line. `most`: how many rows are shown;
    the title tells if there are more.
    """

    columns: Mapping[str, Column]
    rows: Sequence[Data]
    title: str = ""
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """Values beside their names. Those that are empty are left out."""

    entries: Mapping[str, str]
    title: str = ""


Page = Sequence[Table | Facts | str]  # parts that are printed with an empty line between them


def write_file(path: Path, text: str) -> None:
    """Replace the file, see `write_atomic`. Raises TeraioError if it cannot be written."""
    try:
        write_atomic(path, text)
    except OSError as error:
        raise planner.TeraioError(f"{path}: cannot be written: {error.strerror}") from error


def data_of(model: FrozenModel) -> Data:
    """Return a model as data."""
    return model.model_dump(mode="json", by_alias=True)


def work_of(trace: planner.Trace) -> Data | None:
    """Return what an iteration of the trace gets done, as data."""
    return None if trace.work is None else data_of(trace.work)


def show_or_print(data: Data, page: Page, *, as_json: bool) -> None:
    """Print the data as JSON if that is asked for, else the page that shows it. Raises as `write_out` does."""
    if as_json:
        write_out(json.dumps(data, indent=1))
        return
    console = Console()
    if not console.is_terminal:
        console.width = _WIDE  # a file is as wide as needed, so that programs find each row in one line
    parts = [part for part in page if not isinstance(part, Table) or part.rows]
    with _explained(), console.capture() as capture:
        for position, part in enumerate(parts):
            console.print(*([""] if position else []), _rendered(part), sep="\n")
    text = "\n".join(line.rstrip() for line in capture.get().splitlines())
    write_out(text.encode(console.encoding, "replace").decode(console.encoding))  # the terminal may lack a character


@contextlib.contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Say on standard error what takes more than two seconds: in a line that moves on a terminal, elsewhere in a line for each.

    Gives the function to call with what is done next.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(what) as status:
            yield status.update
        return
    timers: list[Timer] = []

    def begin(text: str) -> None:
        for timer in timers:
            timer.cancel()
        timers.append(Timer(_SILENT_SECONDS, lambda: print(f"{text} ...", file=sys.stderr, flush=True)))
        timers[-1].daemon = True
        timers[-1].start()

    begin(what)
    try:
        yield begin
    finally:
        timers[-1].cancel()


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
        raise planner.TeraioError(f"the standard output cannot be written: {error.strerror}") from error


def _rendered(part: Table | Facts | str) -> RenderableType:
    if isinstance(part, str):
        return _plain(part)
    shown = _facts(part.entries) if isinstance(part, Facts) else _rows(part)
    title = part.title
    if isinstance(part, Table) and part.most is not None and part.most < len(part.rows):
        title += f": {part.most} of {len(part.rows)} (--rows shows more)"
    return Group(Text(title, style="bold"), shown) if title else shown


def _rows(part: Table) -> RenderableType:
    shown = rich_table.Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in part.columns:
        whole = name.startswith((">", "|"))  # numbers stay in one line to be compared; long names are folded, never cut
        justify: Any = "right" if name.startswith(">") else "left"
        shown.add_column(name.lstrip(">|"), justify=justify, overflow="fold", no_wrap=whole)
    for row in part.rows[: part.most]:
        shown.add_row(*(_plain(cell(row, column)) for column in part.columns.values()))
    return shown


def _facts(entries: Mapping[str, str]) -> RenderableType:
    shown = rich_table.Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    for name, value in entries.items():
        if value:
            shown.add_row(name, _plain(value))
    return shown


def _plain(text: str | Text) -> Text:
    """Return text that is shown as it is. Names come from files: no markup, no characters that a terminal might act on."""
    return text if isinstance(text, Text) else Text(printable(text))


def cell(row: Data, column: Column) -> Any:
    """Return what stands in a column of a row: a field in the unit that its name tells, "" for None."""
    if not isinstance(column, str):
        return column(row) or ""
    value: Any = row
    for name in column.split("."):
        value = None if value is None else value.get(name)
    if value is None:
        return ""
    if column.endswith("bytes_per_second"):
        return f"{format_bytes(value)}/s"
    if column.endswith("_bytes"):
        return format_bytes(value)
    if column.endswith("seconds"):
        return format_seconds(value)
    return f"{value:.1%}" if column.endswith(("_fraction", "_share")) else str(value)


def format_seconds(seconds: float) -> str:
    """Return "1.50 s", "64.0 ms" or "3.00 µs"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{three_digits(seconds / scale)} {unit}"
    return "0 s" if seconds <= 0 else f"{seconds / 1e-9:.0f} ns"


def rates(seconds: float | None, work: Data | None) -> dict[str, str]:
    """Return what is done in a second if an iteration takes so long: "tokens/s", "samples/s", "TFLOP/s" and "MFU".

    work: of the iteration, as in a trace; what it does not say is left out.
    """
    if not seconds or not work:
        return {}
    found = {f"{each}/s": three_digits(work[each] / seconds) for each in ("tokens", "samples") if work[each]}
    if work["flops"]:
        found["TFLOP/s"] = three_digits(work["flops"] / seconds / 1e12)
        if work["peak_flops_per_second"]:
            found["MFU"] = share(work["flops"], work["peak_flops_per_second"] * seconds)
    return found


def iteration_time(seconds: float, work: Data | None) -> str:
    """Return "1.50 s", or "1.50 s, 5,461 tokens/s, 312 TFLOP/s, 31.5% MFU"."""
    return ", ".join((format_seconds(seconds), *(f"{rate} {name}" for name, rate in rates(seconds, work).items())))


def rate_columns(work: Data | None) -> dict[str, Column]:
    """Return a column for each rate of rows with what is `predicted`. work: of each row that has none of its own."""

    def column(name: str) -> Column:
        return lambda row: row["predicted"] and rates(row["predicted"]["iteration_seconds"], row.get("work", work)).get(name)

    return {f">{name}": column(name) for name in rates(1.0, work)}


def some_seconds(seconds: float | None) -> str:
    """Return "" for None and for 0, so that a fact is left out."""
    return format_seconds(seconds) if seconds else ""


def in_asked_unit(size_bytes: int) -> str:
    """Return a budget in the unit that it was asked in: "6.5 GB" or "100 MB" if whole in MB and not in MiB, else "24.0 GiB"."""
    if size_bytes % 10**6 or size_bytes % (1 << 20) == 0:
        return format_bytes(size_bytes)
    return f"{size_bytes / 1e9:,.10g} GB" if size_bytes >= 10**9 else f"{size_bytes // 10**6} MB"


def budget(size_bytes: int | None) -> str:
    """Return "6.5 GB (6.05 GiB)" or "24.0 GiB (25,769,803,776 bytes)"; "no limit" for None."""
    if size_bytes is None:
        return "no limit"
    asked, rounded = in_asked_unit(size_bytes), format_bytes(size_bytes)
    return exact_bytes(size_bytes) if asked == rounded else f"{asked} ({rounded})"


def budget_facts(budgets: Data) -> dict[str, str]:
    """Return the budgets as facts."""
    return {f"{tier} budget": budget(budgets[f"{tier}_bytes"]) for tier in ("device", "host", "storage")}


def share(part: float, whole: float) -> str:
    """Return "12.5%"; 0 if `whole` is 0."""
    return f"{part / whole if whole else 0.0:.1%}"


def named(number: int | None, name: str | None) -> str:
    """Return the number of a stage or block, with its name if that is known; "" for None."""
    return " ".join(str(each) for each in (number, name) if each is not None)
